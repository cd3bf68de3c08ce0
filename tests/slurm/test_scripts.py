"""Scripts, layouts and records without a SLURM: quoting, shellcheck, refusals, idempotence with a stand-in sbatch."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from calm_scale.cli.app import app
from calm_scale.config import ConfigError, RunConfig, load, load_as
from calm_scale.config.cluster import ClusterConfig
from calm_scale.config.run_folder import Stage
from calm_scale.runtime import link_check
from launchers.errors import LaunchError
from launchers.slurm.layout import shape_of
from launchers.slurm.notice import limit_seconds, measured, notice_seconds
from launchers.slurm.preflight import NodeReport, judge
from launchers.slurm.record import RunRecord
from launchers.slurm.status import job_status
from launchers.slurm.submit import fingerprint, submit, submit_sweep
from launchers.slurm.templates import _environment

Layout = tuple[int, int, int | None] | tuple[int, int, int | None, int]
Profile = Callable[..., ClusterConfig]
MakeRun = Callable[..., RunConfig]
ROOT = Path(__file__).resolve().parents[2]
NASTY = "a b; touch /tmp/owned $(touch /tmp/owned) `touch /tmp/owned` & *"
CONTAINERS = [
    None,
    {"runtime": "pyxis", "image": f"/images/{NASTY}", "mounts": ["/data:/data"]},
    {"runtime": "apptainer", "image": f"/images/{NASTY}", "mounts": ["/data:/data"]},
]


@pytest.mark.parametrize(
    ("container", "mpi"),
    zip(CONTAINERS, ["pmix", "pmix", "mpirun"], strict=True),
    ids=["bare", "pyxis", "apptainer"],
)
def test_scripts_are_plain_bash_and_shellcheck_clean(
    profile: Profile, make_run: MakeRun, tmp_path: Path, container: dict[str, str] | None, mpi: str
) -> None:
    spaces = container is None or container["runtime"] != "pyxis"  # pyxis can mount no path with a space
    cluster = profile(
        container=container,
        mpi=mpi,
        eval_each_checkpoint=True,
        gpus_per_node=2,
        gpu_type="h100",
        network_interface="ib0; reboot",
        modules=["cuda/12 ; reboot"],
        environment={"NCCL_DEBUG": "it's $HOME"},
        account=NASTY,
        extra_directives=["--reservation=x"],
        stages={},
    )
    run = make_run("check", workdir=str(tmp_path / ("check run" if spaces else "check")))
    submission = submit(run, cluster, dry_run=True)
    assert [job.stage for job in submission.jobs] == list(Stage)
    scripts = [str(job.script) for job in submission.jobs]
    for script in scripts:
        assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}") or "shellcheck"
    found = subprocess.run([checker, *scripts], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_values_of_a_profile_run_nothing(profile: Profile, make_run: MakeRun, tmp_path: Path) -> None:
    """The part of a script that only sets things, executed: nothing of a value is taken for code."""
    mark = tmp_path / "owned"
    nasty = f"x; touch {mark} $(touch {mark}) `touch {mark}` 'it'"
    cluster = profile(environment={"NASTY": nasty}, network_interface=nasty, modules=[nasty], setup=[])
    script = submit(make_run("nasty"), cluster, dry_run=True).jobs[2].script.read_text()
    settings = [
        line for line in script.splitlines() if line.startswith(("export N", "module load", "site_line $?"))
    ]
    assert len(settings) == 4
    shell = "module() { :; }; site_line() { :; }\n" + "\n".join(settings) + '\nprintf %s "$NASTY"'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    assert done.stdout == nasty
    assert not mark.exists()


def test_an_undefined_variable_fails() -> None:
    import jinja2

    with pytest.raises(jinja2.UndefinedError):
        _environment().get_template("lm.sbatch.j2").render(stage="lm")


def test_no_site_path_port_or_count_in_the_templates() -> None:
    for template in sorted((ROOT / "slurm").glob("*.j2")):
        text = template.read_text()
        assert "/home" not in text
        assert "--nodes=1 " not in text, template
        assert "29500" not in text


@pytest.mark.parametrize("character", ["%", "'", "\n", '"', "\\"])
def test_paths_sbatch_would_misread_are_refused(
    profile: Profile, make_run: MakeRun, tmp_path: Path, character: str
) -> None:
    run = make_run("path", workdir=str(tmp_path / f"a{character}b"))
    with pytest.raises(ConfigError, match="sbatch cannot take"):
        submit(run, profile(), dry_run=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"partition": "a\n#SBATCH --uid=0"}, "one line"),
        ({"environment": {"A;B": "1"}}, "not a name"),
        ({"environment": {"WANDB_API_KEY": "1"}}, "secret"),
        ({"max_time": "soon"}, "time limit"),
        ({"max_time": "1:2:3:4"}, "time limit"),
        ({"max_time": "2-"}, "time limit"),
        ({"extra_directives": ["reservation"]}, "not an sbatch option"),
        ({"extra_directives": ["--comment='open"]}, "No closing quotation"),
        ({"environment": {"A": True}}, "valid string"),
        ({"python": "~nosuchuser/python"}, "names no home directory"),
        ({"cpus_per_node": "16"}, "without quotes"),
        ({"preflight": 1.5}, "valid boolean"),
    ],
)
def test_profiles_are_checked(profile: Profile, change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        profile(**change)


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs" / "clusters").glob("*.yaml")))
def test_profiles_in_the_house_fit_the_xl_run(name: str) -> None:
    cluster = load_as(ClusterConfig, ROOT / "configs" / "clusters" / f"{name}.yaml")
    run = load(ROOT / "configs" / "runs" / "calm-xl.yaml")
    for stage in run.stages:
        assert shape_of(run, cluster, stage).num_tasks >= 1


def gpu(profile: Profile, nodes: int | None = None) -> ClusterConfig:
    return profile(gpus_per_node=8, cpus_per_node=64, stages={"lm": {"nodes": nodes}})


def lm(tensor: int, pipeline: int, data: int | None, batch: int = 64) -> dict[str, object]:
    backbone = {"num_layers": 8, "hidden_size": 64, "ffn_size": 64, "num_heads": 8, "positions": 4}
    return {
        "backbone": backbone,
        "training": {"steps": 1, "global_batch": batch},
        "parallel": {"tensor": tensor, "pipeline": pipeline, "data": data},
    }


def test_an_evaluation_gets_the_ranks_of_whole_models(profile: Profile, make_run: MakeRun) -> None:
    def shape(tensor: int, tasks: int | None) -> tuple[int, int, int]:
        run = make_run("split", lm=lm(1, 1, 1), evaluation={"tensor_parallel": tensor})
        cluster = profile(gpus_per_node=8, cpus_per_node=64, stages={"eval": {"tasks_per_node": tasks}})
        found = shape_of(run, cluster, "eval")
        return found.nodes, found.tasks_per_node, found.gpus_per_node

    assert shape(1, None) == (1, 1, 1)
    assert shape(4, None) == (1, 4, 4)
    assert shape(2, 8) == (1, 8, 8)
    with pytest.raises(ConfigError, match=r"tasks_per_node of .* to a multiple of 4"):
        shape(4, 6)
    with pytest.raises(ValueError, match=r"evaluation.tensor_parallel 3: .*num_heads 8 is not divisible"):
        shape(3, None)


@pytest.mark.parametrize(
    ("layout", "nodes", "expected"),
    [
        ((2, 2, 4), None, (2, 8)),
        ((2, 2, None), 2, (2, 8)),
        ((1, 1, 4), None, (1, 4)),
        ((4, 1, 1), None, (1, 4)),
        ((2, 1, 4), 4, (1, 8)),  # `plan` set all of it: the profile's 4 nodes would leave GPUs idle
        ((1, 1, 12, 48), 1, (2, 6)),
    ],
)
def test_layouts_become_nodes_and_tasks(
    profile: Profile,
    make_run: MakeRun,
    layout: Layout,
    nodes: int | None,
    expected: tuple[int, int],
) -> None:
    shape = shape_of(make_run("shape", lm=lm(*layout)), gpu(profile, nodes), "lm")
    assert (shape.nodes, shape.tasks_per_node) == expected
    assert shape.gpus_per_node == expected[1]
    assert (f"stages.lm.nodes: {nodes} of the profile is not followed" in shape.note) == (
        nodes not in (None, expected[0])
    )


@pytest.mark.parametrize(
    ("layout", "nodes", "said"),
    [
        ((1, 1, 9, 63), None, "world sizes are 8 and 10"),
        ((4, 3, None), 1, "world sizes are 12 and 24"),
        ((2, 2, None), 3, "global_batch 64"),
    ],
)
def test_impossible_layouts_name_the_nearest(
    profile: Profile, make_run: MakeRun, layout: Layout, nodes: int | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        shape_of(make_run("shape", lm=lm(*layout)), gpu(profile, nodes), "lm")


def test_fingerprints_follow_what_a_stage_depends_on(make_run: MakeRun) -> None:
    run = make_run("print")
    scored = run.model_copy(update={"evaluation": run.evaluation.model_copy(update={"seed": 1})})
    assert fingerprint(run, "lm") == fingerprint(scored, "lm")
    assert fingerprint(run, "eval") != fingerprint(scored, "eval")
    seeded = run.model_copy(update={"seed": 5})
    assert all(fingerprint(run, stage) != fingerprint(seeded, stage) for stage in Stage)


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """sbatch and squeue that keep a list of jobs in a file."""
    folder = tmp_path / "fake"
    folder.mkdir()
    (folder / "queue").touch()
    scripts = {
        "sbatch": f'echo "$@" >> {folder}/calls; n=$(wc -l < {folder}/calls)\n'
        f'echo "$n|PENDING|Dependency|1:00|N/A||N/A|$n" >> {folder}/queue; echo "$n;cluster"',
        "squeue": f"cat {folder}/queue",
    }
    for name, body in scripts.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def test_a_broken_off_submission_is_taken_up(fake_slurm: Path, profile: Profile, make_run: MakeRun) -> None:
    run = make_run("again")
    first = submit(run, profile(), stages=["prep", "autoencoder"])
    assert [job.job_id for job in first.jobs] == ["1", "2"]
    second = submit(run, profile())
    assert [job.job_id for job in second.jobs] == ["1", "2", "3", "4"]
    calls = (fake_slurm / "calls").read_text().splitlines()
    assert "--dependency=afterok:2" in calls[2]
    assert "--dependency=afterok:3" in calls[3]
    assert len(calls) == 4
    states = [stage.state for stage in job_status(run.workdir).stages]
    assert states == ["pending"] * 4


def test_a_queued_job_of_another_configuration_is_not_silently_kept(
    fake_slurm: Path, profile: Profile, make_run: MakeRun
) -> None:
    run = make_run("other")
    submit(run, profile())
    changed = run.model_copy(update={"seed": 3})
    with pytest.raises(LaunchError, match="another configuration"):
        submit(changed, profile())


def test_done_stages_are_left_out_of_the_chain(fake_slurm: Path, profile: Profile, make_run: MakeRun) -> None:
    run = make_run("partly")
    record = RunRecord(run.workdir)
    record.create()
    for stage in ("prep", "autoencoder"):
        (record.state / f"{stage}.done").write_text(fingerprint(run, stage) + "\n")
    jobs = submit(run, profile()).jobs
    assert [job.outcome for job in jobs] == ["done already", "done already", "submitted", "submitted"]
    assert "--dependency" not in (fake_slurm / "calls").read_text().splitlines()[0]


def test_submitting_needs_slurm_but_a_dry_run_does_not(
    profile: Profile, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    run = make_run("nowhere")
    assert {job.outcome for job in submit(run, profile(), dry_run=True).jobs} == {"written"}
    with pytest.raises(LaunchError, match="sbatch was not found"):
        submit(run, profile())


def test_a_slurm_without_a_cluster_is_told_once_in_our_words(
    fake_slurm: Path, profile: Profile, make_run: MakeRun, tmp_path: Path
) -> None:
    (fake_slurm / "squeue").write_text(
        "#!/bin/bash\necho 'squeue: fatal: Could not establish a configuration source' >&2; exit 1\n"
    )
    runs = [make_run(name, workdir=str(tmp_path / "sweep" / name)) for name in ("a", "b")]
    submit_sweep(runs, profile(), tmp_path / "sweep", dry_run=True)
    done = CliRunner().invoke(
        app, ["status", str(tmp_path / "sweep")], env={"COLUMNS": "300"}, catch_exceptions=False
    )
    assert done.output.count("SLURM does not work on this machine") == 1
    assert "fatal" not in done.output
    with pytest.raises(LaunchError, match="SLURM does not work on this machine"):
        submit(runs[0], profile())


def test_a_sweep_needs_a_workdir_each(profile: Profile, make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("same")
    with pytest.raises(ConfigError, match="workdir each"):
        submit_sweep([run, run], profile(), tmp_path)


def test_the_stored_configuration_is_the_run(profile: Profile, make_run: MakeRun) -> None:
    run = make_run("stored")
    submit(run, profile(), dry_run=True)
    stored = next((run.workdir / "slurm").glob("config-*.yaml"))
    assert load(stored) == run
    # Looking at another configuration does not change what jobs in the queue read.
    submit(run.model_copy(update={"seed": 5}), profile(), dry_run=True)
    assert load(stored) == run


def test_notice_follows_the_measured_times(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    assert notice_seconds(ledger) == 600
    events = [
        {"kind": "start", "attempt": 0, "seconds": {}},
        {"kind": "save", "attempt": 0, "steps_done": 10, "seconds": {"train": 50.0, "save": 40.0}},
        {"kind": "save", "attempt": 0, "steps_done": 20, "seconds": {"train": 100.0, "save": 80.0}},
    ]
    ledger.write_text("\n".join(map(json.dumps, events)) + '\n{"kind": "sa')
    assert measured(ledger) == (5.0, 40.0)
    assert notice_seconds(ledger) == 105


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("1-02:03:04", 93_784),
        ("02:00:30", 7_230),
        ("90", 5_400),
        ("1:30", 90),
        ("2-00:00:00", 172_800),
        ("2-12", 216_000),
        ("1-1:30", 91_800),
        ("168:00:00", 604_800),
        ("0", sys.maxsize),
        ("UNLIMITED", sys.maxsize),
    ],
)
def test_time_limits_in_seconds(limit: str, seconds: int) -> None:
    assert limit_seconds(limit) == seconds


def test_slurm_warns_late_where_the_script_keeps_the_clock(profile: Profile, make_run: MakeRun) -> None:
    """SLURM's warning is fixed at submission; what was measured since is asked for in every life."""
    lines = {}
    for name, notice, limit in (
        ("own", None, "1-00:00:00"),
        ("short", None, "00:02:00"),
        ("fixed", 900, "00:20:00"),
    ):
        cluster = profile(requeue={"notice_seconds": notice}, max_time=limit)
        text = submit(make_run(name), cluster, dry_run=True, stages=["prep"]).jobs[0].script.read_text()
        lines[name] = [
            line for line in text.splitlines() if "--signal" in line or line.startswith("KEEPS_CLOCK")
        ]
    assert [line.split("@")[1] for line in (lines[name][0] for name in lines)] == ["180", "60", "900"]
    assert [lines[name][1][:13] for name in lines] == ["KEEPS_CLOCK=1", "KEEPS_CLOCK=1", "KEEPS_CLOCK=0"]


@pytest.mark.parametrize(
    ("measured", "left", "expected"),
    [(True, 1000, 85), (False, 4000, 600), (True, 100, 50), (False, 100, 50)],
)
def test_the_ranks_are_told_in_time_for_what_was_measured(
    profile: Profile, make_run: MakeRun, measured: bool, left: int, expected: int
) -> None:
    """Step 5 s + save 20 s + 60 s = 85 s before the end; never more than half of what is left."""
    run = make_run("clock")
    cluster = profile(requeue={}, python=sys.executable)
    text = submit(run, cluster, dry_run=True, stages=["lm"]).jobs[0].script.read_text()
    if measured:
        (run.workdir / "lm").mkdir()
        event = {"kind": "save", "attempt": 0, "steps_done": 10, "seconds": {"train": 50.0, "save": 20.0}}
        (run.workdir / "lm" / "ledger.jsonl").write_text(json.dumps(event) + "\n")
    functions = text[: text.index("\nbegin_attempt\n")]
    stubs = f'seconds_left() {{ echo {left}; }}\nafter() {{ echo "after $*" | sed "s/ $$//"; }}\n'
    done = subprocess.run(
        ["bash", "-c", f"{functions}\n{stubs}\nkeep_clock; wait"],
        env={**os.environ, "SLURM_JOB_ID": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert f"the ranks are told {expected} s before the time limit" in done.stdout, done.stderr
    assert f"after {left - expected} kill -USR1" in done.stdout


USUAL = {"driver": "550", "gpu_name": "H100", "max_clock": "1980", "python": "3.11.9"}


def test_preflight_names_the_odd_node() -> None:
    reports = [NodeReport(f"n{index}", **USUAL) for index in range(3)]
    assert judge(reports).is_fine
    wrong_clock = NodeReport("n4", **USUAL, clock_skew=120.0)
    assert "clock" in judge([*reports, wrong_clock]).bad["n4"]
    broken = NodeReport("n5", "6 of 8 GPUs answer", **{**USUAL, "driver": ""})
    assert judge([*reports, broken]).bad == {"n5": "6 of 8 GPUs answer"}
    assert judge([broken]).bad == {"n5": "6 of 8 GPUs answer"}, "a job on one node moves to another"


@pytest.mark.parametrize("field", sorted(USUAL))
def test_a_node_that_only_differs_is_named_and_used(field: str) -> None:
    reports = [NodeReport(f"n{index}", **USUAL) for index in range(3)]
    odd = NodeReport("n3", **{**USUAL, field: "another"})
    found = judge([*reports, odd])
    assert found.is_fine
    assert found.remarks == (f"the nodes differ in {field}: {USUAL[field]} on n0, n1, n2; another on n3",)


@pytest.mark.parametrize(
    "reports",
    [
        [NodeReport(f"n{index}", "nvidia-smi does not answer") for index in range(4)],
        [NodeReport("n0", **USUAL), *(NodeReport(f"n{i}", "0 of 8 GPUs answer") for i in (1, 2))],
        [NodeReport("n0", "nvidia-smi was not found", is_common=True)],
        [NodeReport(f"n{index}", **USUAL, clock_skew=99.0) for index in range(2)],
    ],
    ids=["all", "most", "a program is missing", "the clock of the filesystem"],
)
def test_a_fault_of_most_nodes_is_a_fault_of_the_check(reports: list[NodeReport]) -> None:
    found = judge(reports)
    assert not found.is_fine
    assert found.bad == {}
    assert "no node is excluded" in found.fault


def test_a_node_that_has_not_answered_is_late_and_not_bad() -> None:
    found = judge([NodeReport("n0", **USUAL)], allocated=["n0", "n1"])
    assert (found.bad, found.fault, found.late, found.is_fine) == ({}, "", ("n1",), False)


def test_a_torn_history_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    record.create()
    (record.state / "lm.attempts").write_text(
        "start 1 7 -1 100 n[1-2]\nend 1 7 limit 75 -1 40 160\nstart 2 7 40 200 n[1-2]\nend 2 7 cra"
    )
    attempts = record.attempts("lm")
    assert [(life.cause, life.ended_at) for life in attempts] == [("limit", 40), ("", None)]


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 7, 8])
def test_the_ring_covers_every_node_in_disjoint_rounds(num_nodes: int) -> None:
    rounds = link_check.ring(num_nodes)
    links = [link for pairs in rounds for link in pairs]
    assert len(links) == len(set(links)) == (1 if num_nodes == 2 else num_nodes)
    for pairs in rounds:
        ends = [node for link in pairs for node in link]
        assert len(ends) == len(set(ends))


def test_a_slow_or_wrong_node_is_told_from_its_neighbours() -> None:
    bad_nodes = link_check.bad_nodes
    assert bad_nodes({(0, 1): 10.0, (1, 2): 11.0, (2, 3): 10.5, (3, 0): 9.0}) == {}
    assert list(bad_nodes({(0, 1): 10.0, (1, 2): 2.0, (2, 3): 2.1, (3, 4): 10.0, (4, 0): 10.0})) == [2]
    assert list(bad_nodes({(0, 1): 10.0, (1, 2): 0.0, (2, 3): 0.0, (3, 0): 10.0})) == [2]
    assert sorted(bad_nodes({(0, 1): 0.0})) == [0, 1]
    assert bad_nodes({(0, 1): 0.3}) == {}


@pytest.mark.parametrize(
    ("directive", "option"),
    [
        ("--array=1-3", "array"),
        ("--arr 1-3", "array"),
        ("-a1-3", "array"),
        ("--no-requeue", "no-requeue"),
        ("--requeue", "requeue"),
        ("--job-name=foo bar", "job-name"),
        ("-J foo", "job-name"),
        ("-N 4", "nodes"),
        ("-N4", "nodes"),
        ("--nodes 4", "nodes"),
        ("--ntasks-per-node=8", "ntasks-per-node"),
        ("-n8", "ntasks"),
        ("-o log", "output"),
        ("--output=log", "output"),
        ("--dependency=afterok:1", "dependency"),
        ("--signal=B:TERM@5", "signal"),
        ("--time=1", "time"),
        ("--reservation=x --array=1-3", "array"),
    ],
)
def test_directives_that_the_scripts_rely_on_are_refused_by_name(
    profile: Profile, directive: str, option: str
) -> None:
    for change in (
        {"extra_directives": [directive]},
        {"stages": {"lm": {"extra_directives": directive}}},
    ):
        with pytest.raises(ValueError, match=f"a profile cannot set --{option}: "):
            profile(**change)


@pytest.mark.parametrize(
    "directive",
    ["--reservation=x", "--partition=cpu", "-p cpu", "--mem-per-cpu=2G", "--nodelist=a[1-2]", "--exclusive"],
)
def test_other_directives_pass(profile: Profile, directive: str) -> None:
    assert profile(extra_directives=[directive]).extra_directives == (directive,)


@pytest.mark.parametrize(
    ("limit", "meant"),
    [
        ("2-12", "2-12"),
        ("1-1:30", "1-1:30"),
        ("168:00:00", "168:00:00"),
        ("24:00:00", "24:00:00"),
        ("'24:00:00'", "24:00:00"),
        ("1:30", "1:30"),
        ("90", "90"),
        ("UNLIMITED", "UNLIMITED"),
    ],
)
def test_every_form_of_a_time_limit_is_read_as_written(tmp_path: Path, limit: str, meant: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        f"cpus_per_node: 1\nmax_time: {limit}\nenvironment: {{OMP_NUM_THREADS: 4}}\nstages: {{lm: {{time: {limit}}}}}\n"
    )
    cluster = load_as(ClusterConfig, path)
    assert (cluster.max_time, cluster.stages.lm.time) == (meant, meant)
    assert cluster.environment == {"OMP_NUM_THREADS": "4"}
