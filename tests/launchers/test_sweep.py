"""`submit --sweep`: a grid of runs that share what the values do not change, as job arrays, task by task."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from calm_scale.cli.app import app
from calm_scale.config import ConfigError, load
from calm_scale.config.run import tokens_per_step
from calm_scale.config.run_folder import TRAINED
from calm_scale.stages.sweep import plan_sweep
from launchers.slurm.record import RunRecord
from launchers.slurm.submit import fingerprint

LR = "lm.training.optimizer.lr=1e-4,2e-4"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A run document, its profile beside it."""
    training = {"steps": 10, "global_batch": 4, "precision": "fp32"}
    document = {
        "name": "base",
        "workdir": str(tmp_path / "base run"),
        "vocab_size": 64,
        "patch_size": 2,
        "prep": {"sources": [{"paths": ["text.jsonl"]}], "sequence_length": 8192},
        "autoencoder": {"training": training, "zero": {"data": 2}},
        "lm": {
            "backbone": {"num_layers": 2, "hidden_size": 16, "ffn_size": 32, "num_heads": 2, "positions": 4},
            "training": training,
            "head": {"kind": "energy"},
            "parallel": {"tensor": 2, "data": 1},
        },
    }
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(document))
    (tmp_path / "cluster.yaml").write_text("name: tiny\ncpus_per_node: 8\n")
    return tmp_path / "base.yaml"


def submit(base: Path, *options: str) -> str:
    command = ["submit", str(base), "--cluster", str(base.with_name("cluster.yaml")), *options]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "200"}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_grid_shares_what_it_does_not_change(base: Path) -> None:
    sweep = plan_sweep(base, [], [LR, "lm.head.num_samples=4,8"])
    assert (sweep.shared, sweep.own) == (("prep", "autoencoder"), ("lm", "eval"))
    assert [run.name for run in sweep.runs] == [
        f"base-lr-{lr}_num_samples-{samples}" for lr in ("1e-4", "2e-4") for samples in (4, 8)
    ]
    for run, (lr, samples) in zip(sweep.runs, [(1e-4, 4), (1e-4, 8), (2e-4, 4), (2e-4, 8)], strict=True):
        assert run.lm is not None
        assert (run.lm.training.optimizer.lr, run.lm.head.num_samples) == (lr, samples)  # type: ignore[union-attr]
        assert run.data_dir == sweep.base.data_dir
        assert run.tokenizer_path == sweep.base.tokenizer_path
        assert run.autoencoder_export == sweep.base.autoencoder_export
        assert run.workdir.parent == sweep.folder
    assert len({run.workdir for run in sweep.runs}) == 4


def test_the_first_stage_that_changes_begins_each_runs_own(base: Path) -> None:
    by_key = {
        "autoencoder.training.steps=5,6": ("prep",),
        "autoencoder.objective.kl_floor=0,0.5": ("prep",),
        "prep.packing=concat,aligned": (),
        "lm.training.steps=5,6": ("prep", "autoencoder"),
    }
    for text, shared in by_key.items():
        sweep = plan_sweep(base, [], [text])
        assert sweep.shared == shared, text
        folders = {run.data_dir for run in sweep.runs}
        assert folders == ({sweep.base.data_dir} if shared else {run.workdir / "data" for run in sweep.runs})
        exports = {run.autoencoder_export for run in sweep.runs}
        assert len(exports) == (1 if "autoencoder" in shared else 2), text


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["lm.training.steps"], "key.path=value"),
        (["lm.training.steps=1,"], "key.path=value"),
        (["lm.training.steps=1,1"], "is listed twice"),
        (["lm.training.steps=1", "lm.training.steps=2"], "names a key twice"),
        (["lm.training.optimizer.lr=1e-3,0.001"], "base-lr-1e-3 and base-lr-0.001 are the same run"),
        (["evaluation.seed=1,2"], "changes nothing that is trained"),
        (["name=a,b"], "changes nothing that is trained"),
        (["lm.training.stepz=1,2"], "did you mean `steps`"),
        (["seed=" + ",".join(map(str, range(1001)))], "more than 1000"),
    ],
)
def test_other_sweeps_are_refused(base: Path, texts: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_sweep(base, [], texts)


def test_a_value_may_hold_commas_in_braces(base: Path) -> None:
    runs = plan_sweep(
        base, [], ["lm.head={kind: energy, num_samples: 2},{kind: energy, num_samples: 4}"]
    ).runs
    assert [run.lm.head.num_samples for run in runs] == [2, 4]  # type: ignore[union-attr]


@pytest.mark.parametrize("key", ["patch_size=2,4", "lm.backbone.positions=4,8", "autoencoder.patches=4,8"])
def test_a_sweep_keeps_the_tokens_of_a_step(base: Path, key: str) -> None:
    sweep = plan_sweep(base, [], [key])
    tokens = {(stage, tokens_per_step(run, stage)) for run in sweep.runs for stage in TRAINED}
    assert tokens == {(stage, tokens_per_step(sweep.base, stage)) for stage in TRAINED}
    assert (
        all(re.search(r"global_batch \d+ instead of 4 keeps", line) for line in sweep.notes) and sweep.notes
    )
    assert "note: base-" in submit(base, "--sweep", key, "--dry-run")
    with pytest.raises(
        ConfigError, match=r"no whole number of its sequences of 64; set lm\.training\.global_batch"
    ):
        plan_sweep(base, [], ["lm.backbone.positions=32"])
    sizes = "lm.training.global_batch=4,8"
    assert len(plan_sweep(base, [], [sizes]).runs) == 2, "a sweep of the batch itself means it"
    name, values = key.split("=")
    output = submit(base, "--set", f"{name}={values.split(',')[1]}", "--dry-run")
    assert re.search(r"note: .*global_batch counts sequences: a step has", output)
    assert "counts sequences" not in submit(base, "--set", sizes.split(",", maxsplit=1)[0], "--dry-run")


def test_a_dry_run_shows_every_task_and_queues_nothing(base: Path) -> None:
    output = submit(base, "--sweep", LR, "--dry-run")
    assert "dry run: nothing was queued" in output
    assert "one of 2 runs, disk of all" in output
    assert "MiB (2 runs)" in output
    folder = load(base).workdir / "sweep"
    for index, name in enumerate(("lr-1e-4", "lr-2e-4")):
        assert f"│ {index} " in output
        assert name in output
        stored = next((folder / name / "slurm").glob("config-*.yaml"))
        assert load(stored).name == f"base-{name}"
    script = (folder / "lm.sbatch").read_text()
    assert "#SBATCH --array=0-1" in script
    assert not (folder / "prep.sbatch").exists()
    assert (folder.parent / "slurm" / "prep.sbatch").exists()


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """sbatch and squeue that keep a list of jobs, an array's tasks one a line; returns sbatch's calls."""
    folder = tmp_path / "fake"
    folder.mkdir()
    for name in ("queue", "calls"):
        (folder / name).touch()
    bodies = {
        "sbatch": 'echo "$@" >> F/calls; n=$(wc -l < F/calls); line="|PENDING|x|1:00|N/A||N/A|$n"\n'
        "tasks=$(grep -o -- '--array=[0-9,]*' <<<\"$*\" | cut -d= -f2 | tr , ' ')\n"
        'if [[ -z $tasks ]]; then echo "$n$line" >> F/queue; fi\n'
        'for t in $tasks; do echo "${n}_$t$line" >> F/queue; done; echo "$n"',
        "squeue": "cat F/queue",
    }
    for name, body in bodies.items():
        path = folder / name
        path.write_text("#!/bin/bash\n" + body.replace("F/", f"{folder}/") + "\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def test_only_what_is_missing_is_queued_and_only_the_failed_task_again(base: Path, queue: Path) -> None:
    submit(base, "--sweep", LR)
    calls = (queue / "calls").read_text().splitlines()
    options = [call.rpartition(" /")[0] for call in calls]
    assert "--dependency" not in options[0]
    assert "--dependency=afterok:1" in options[1]
    assert "--dependency=afterok:2 --array=0,1" in options[2], "both tasks wait for the shared autoencoder"
    assert "--dependency=aftercorr:3 --array=0,1" in options[3], "each evaluation waits for its own training"
    assert len(calls) == 4
    assert "queued already (0 of 2 tasks)" in submit(base, "--sweep", LR)
    assert len((queue / "calls").read_text().splitlines()) == 4, "submitting again queues nothing"

    sweep = plan_sweep(base, [], [LR])
    shared, (good, bad) = RunRecord(sweep.base.workdir), sweep.runs
    for stage in sweep.shared:
        (shared.state / f"{stage}.done").write_text(fingerprint(sweep.base, stage))
    for stage in sweep.own:
        (RunRecord(good.workdir).state / f"{stage}.done").write_text(fingerprint(good, stage))
    (queue / "queue").write_text("")  # the other task has failed for good
    assert "submitted (1 of 2 tasks)" in submit(base, "--sweep", LR)
    again = [call.rpartition(" /")[0] for call in (queue / "calls").read_text().splitlines()[4:]]
    assert [call.split("--parsable")[1].strip() for call in again] == [
        "--array=1",
        "--dependency=aftercorr:5 --array=1",
    ]
    assert RunRecord(bad.workdir).jobs()["lm"].task_id == "5_1"
    assert RunRecord(good.workdir).jobs()["lm"].task_id == "3_0"


def test_a_larger_sweep_takes_up_the_tasks_of_a_smaller_one(base: Path, queue: Path) -> None:
    submit(base, "--sweep", LR)
    submit(base, "--sweep", "lm.training.optimizer.lr=2e-4,3e-4")
    calls = [call.rpartition(" /")[0] for call in (queue / "calls").read_text().splitlines()[4:]]
    assert [call.split("--parsable")[1].strip() for call in calls] == [
        "--dependency=afterok:2 --array=1",
        "--dependency=aftercorr:5 --array=1",
    ]


def test_what_a_sweep_is_refused_for_is_found_before_anything_is_queued(base: Path, queue: Path) -> None:
    command = ["submit", str(base), "--cluster", str(base.with_name("cluster.yaml"))]
    done = CliRunner().invoke(app, [*command, "--sweep", "lm.parallel.tensor=1,2"])
    assert isinstance(done.exception, ConfigError) and "different layouts" in str(done.exception)
    assert (queue / "calls").read_text() == ""
