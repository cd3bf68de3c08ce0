"""A whole job script without a SLURM: stand-ins for its clients that are silent, refuse, or print the unexpected."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from calm_scale.cli.app import app
from calm_scale.config import RunConfig
from calm_scale.config.cluster import ClusterConfig
from launchers.slurm.record import EXCLUDE_SECONDS, RunRecord
from launchers.slurm.status import job_status
from launchers.slurm.submit import submit

Profile = Callable[..., ClusterConfig]
MakeRun = Callable[..., RunConfig]
ROOT = Path(__file__).resolve().parents[2]
SILENT = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
SQUEUES = {
    "ok": 'case "$*" in *%T*) echo RUNNING ;; esac',
    "once": f"[[ -e $FAKE/asked ]] || {{ touch $FAKE/asked; {SILENT}; }}; echo RUNNING",
    "fail": SILENT,
    "none": 'case "$*" in *%e*) echo NONE ;; *) echo RUNNING ;; esac',
    "relative": 'case "$*" in *%e*) echo "Tomorr 12:34" ;; *) echo RUNNING ;; esac',
}


class Clients:
    """A folder of stand-ins for SLURM's clients, which write down how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.write("squeue", SQUEUES["ok"])
        self.write("scontrol", "")
        self.write("scancel", "")
        self.write("sbatch", "echo 99")
        self.write("srun", 'while [[ $1 == --* ]]; do shift; done; export SLURM_PROCID=0; "$@"')

    def write(self, name: str, body: str) -> None:
        path = self.folder / name
        path.write_text(
            f"#!/bin/bash\nFAKE='{self.folder}'\nprintf '%s\\n' \"{name} $*\" >>$FAKE/calls\n"
            f"env >$FAKE/{name}.env\n{body}\n"
        )
        path.chmod(0o755)

    def calls(self, start: str) -> list[str]:
        path = self.folder / "calls"
        return (
            [line for line in path.read_text().splitlines() if line.startswith(start)]
            if path.exists()
            else []
        )


@pytest.fixture
def clients(tmp_path: Path) -> Clients:
    return Clients(tmp_path / "clients")


def script_of(run: RunConfig, cluster: ClusterConfig, work: str) -> Path:
    """The job script of the language model, whose ranks are the shell command ``work``."""
    script = submit(run, cluster, dry_run=True, stages=["lm"]).jobs[0].script
    text = script.read_text()
    head, _, _ = text.partition("\nrun_step --mpi=none")
    text = f"{head}\nrun_step -- bash -c {shlex.quote(work)}\n\nconclude\n"
    script.write_text(text.replace("PAUSE=10 ", "PAUSE=0.1 ").replace("PATIENCE=1800 ", "PATIENCE=4 "))
    return script


def start(script: Path, clients: Clients, **env: str) -> subprocess.Popen[str]:
    around = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
        "PATH": f"{clients.folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "n[1-2]",
        **env,
    }
    return subprocess.Popen(
        ["bash", str(script)], env=around, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run_script(script: Path, clients: Clients, **env: str) -> tuple[int, str]:
    process = start(script, clients, **env)
    text, _ = process.communicate(timeout=300)
    return process.returncode, text


def plain(profile: Profile, **changes: object) -> ClusterConfig:
    return profile(**{"preflight": False, "requeue": {}, "setup": [], "python": sys.executable, **changes})


@pytest.mark.parametrize("answer", ["once", "fail", "none", "relative"])
@pytest.mark.parametrize("limit", ["job", "profile", "unlimited"])
def test_a_controller_that_does_not_tell_the_end_ends_no_job(
    clients: Clients, profile: Profile, make_run: MakeRun, answer: str, limit: str
) -> None:
    clients.write("squeue", SQUEUES[answer])
    run = make_run("end")
    cluster = plain(profile, max_time="UNLIMITED" if limit == "unlimited" else "24:00:00")
    script = script_of(run, cluster, "trap 'exit 75' USR1; for _ in {1..20}; do sleep 0.1; done")
    end = {"SLURM_JOB_END_TIME": str(int(time.time()) + 86_400)} if limit == "job" else {}
    code, text = run_script(script, clients, SLURM_TIME_FORMAT="relative", **end)
    assert (code, "told to stop" in text) == (0, False), text
    assert [life.cause for life in RunRecord(run.workdir).attempts("lm")] == ["finished"]


def test_the_end_of_an_allocation_around_us_is_not_the_end_of_the_job(
    clients: Clients, profile: Profile, make_run: MakeRun
) -> None:
    script = script_of(make_run("stale"), plain(profile), "sleep 1.5")
    code, text = run_script(script, clients, SLURM_JOB_END_TIME=str(int(time.time()) - 100))
    assert (code, "told to stop" in text) == (0, False), text


@pytest.mark.parametrize("limit", ["UNLIMITED", "24:00:00"])
def test_a_save_is_not_cut_off_by_a_controller_that_does_not_tell_the_end(
    clients: Clients, profile: Profile, make_run: MakeRun, tmp_path: Path, limit: str
) -> None:
    run = make_run("save")
    up, saved = tmp_path / "up", tmp_path / "saved"
    script = script_of(
        run,
        plain(profile, max_time=limit),
        f"trap 'sleep 2; touch {saved}; exit 75' USR1; touch {up}; for _ in {{1..300}}; do sleep 0.1; done",
    )
    clients.write("squeue", SQUEUES["none"])
    clients.write("srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"')
    process = start(script, clients)
    while not up.exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    text, _ = process.communicate(timeout=300)
    assert saved.exists(), text
    assert [(life.cause, life.code) for life in RunRecord(run.workdir).attempts("lm")] == [("limit", 75)]


def test_a_silent_controller_is_asked_again_until_the_job_is_back_in_the_queue(
    clients: Clients, profile: Profile, make_run: MakeRun
) -> None:
    run = make_run("patient")
    clients.write("scontrol", f"(($(grep -c '^scontrol requeue' $FAKE/calls) > 5)) || {{ {SILENT}; }}")
    code, text = run_script(script_of(run, plain(profile), "exit 75"), clients)
    assert code == 0, text
    assert len(clients.calls("scontrol requeue 77")) == 6
    assert not clients.calls("sbatch")
    assert [life.cause for life in RunRecord(run.workdir).attempts("lm")] == ["asked"]


def test_a_silent_controller_is_not_asked_for_ever(
    clients: Clients, profile: Profile, make_run: MakeRun
) -> None:
    clients.write("scontrol", SILENT)
    clients.write("sbatch", SILENT)
    code, text = run_script(script_of(make_run("silent"), plain(profile), "exit 75"), clients)
    assert code == 75
    assert "submit the run again to go on" in text


def test_a_step_that_the_controller_did_not_start_is_nobodys_fault(
    clients: Clients, profile: Profile, make_run: MakeRun
) -> None:
    run = make_run("nostep")
    clients.write("srun", SILENT.replace("slurm_load_jobs", "srun: error: Unable to create step:"))
    code, text = run_script(script_of(run, plain(profile), "true"), clients)
    assert code == 0, text
    assert [life.cause for life in RunRecord(run.workdir).attempts("lm")] == ["controller"]


def test_a_refused_requeue_becomes_a_new_job(clients: Clients, profile: Profile, make_run: MakeRun) -> None:
    run = make_run("refused")
    clients.write(
        "scontrol", '[[ $1 != requeue ]] || { echo "Requested operation is presently disabled" >&2; exit 1; }'
    )
    clients.write(
        "squeue",
        'case "$*" in *%E*) echo "78|afterok:77(unfulfilled)"; echo "79|afterok:770" ;; *) echo RUNNING ;; esac',
    )
    code, text = run_script(script_of(run, plain(profile), "exit 75"), clients)
    assert code == 75, text
    assert "job 99 goes on instead" in text
    (call,) = clients.calls("sbatch")
    assert "--dependency=afterany:77" in call
    assert clients.calls("scontrol update") == ["scontrol update JobId=78 Dependency=afterok:99"]


@pytest.mark.parametrize(
    ("code", "cause", "said"),
    [(76, "nonfinite", "a person must decide"), (2, "misconfigured", "the configuration is wrong")],
)
def test_codes_that_repeat_are_not_requeued(
    clients: Clients, profile: Profile, make_run: MakeRun, code: int, cause: str, said: str
) -> None:
    run = make_run("repeat")
    says = "echo 'srun: error: n{0}: task {0}: Exited with exit code {1}' >&2"
    work = f"{says.format(1, 1)}; {says.format(2, code)}; exit {code}"
    found, text = run_script(script_of(run, plain(profile), work), clients)
    assert found == code, text
    assert not clients.calls("scontrol requeue")
    assert RunRecord(run.workdir).attempts("lm")[-1].cause == cause
    verdict = RunRecord(run.workdir).verdict("lm")
    assert verdict.startswith(f"not requeued ({cause}, code {code})")
    assert said in verdict.splitlines()[0]


FAIL = """
from calm_scale.cli import app
from calm_scale.config import CalmScaleError
from calm_scale.checkpoint.errors import CheckpointError, DiskFullError
from data_prep.errors import CorruptSourceError, ShardError, ShardStorageError
from launchers.errors import LaunchError
def fail(): raise {error}
app.app = fail
app.main()
"""


@pytest.mark.parametrize(
    ("error", "repeats"),
    [
        ("ShardError('shard 7 is damaged')", True),
        ("CorruptSourceError('text.jsonl.gz ends in the middle')", True),
        ("CheckpointError('card.json is damaged')", True),
        ("DiskFullError('no space')", False),
        ("ShardStorageError('no space')", False),
        ("LaunchError('rank 3 is missing')", False),
        ("OSError(28, 'No space left on device')", False),
        ("OSError(5, 'Input/output error', 'x')", False),
        ("CheckpointError('cannot be read') from OSError(116, 'Stale file handle')", False),
        ("CheckpointError('no card') from FileNotFoundError(2, 'No such file')", True),
        ("RuntimeError('CUDA error')", False),
    ],
)
def test_only_errors_that_may_pass_are_requeued(
    clients: Clients, profile: Profile, make_run: MakeRun, error: str, repeats: bool
) -> None:
    run = make_run("fails")
    program = run.workdir / "fail.py"
    program.write_text(FAIL.format(error=error))
    work = f"PYTHONPATH={ROOT} {sys.executable} {shlex.quote(str(program))}"
    code, text = run_script(script_of(run, plain(profile), work), clients)
    cause = RunRecord(run.workdir).attempts("lm")[-1].cause
    verdict = RunRecord(run.workdir).verdict("lm")
    assert bool(clients.calls("scontrol requeue")) is not repeats, text
    assert (cause, code) == (("repeats", 1) if repeats else ("crash", 0)), text
    if repeats:
        assert verdict.startswith("not requeued (repeats, code 1)")
        assert error.split("'")[1] in verdict.splitlines()[1]
        assert job_status(run.workdir).stages[2].verdict == verdict


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"modules": ["cuda/12.9"]}, "code 127 on .*: module load cuda/12.9"),
        ({"setup": ["true", "source /nowhere/activate", "true"]}, "code 1 on .*: source /nowhere/activate"),
    ],
)
def test_a_line_of_the_profile_that_fails_stops_the_job(
    clients: Clients, profile: Profile, make_run: MakeRun, changes: dict[str, list[str]], said: str
) -> None:
    run = make_run("setup")
    code, text = run_script(script_of(run, plain(profile, **changes), "true"), clients)
    assert code == 1, text
    assert not clients.calls("srun")
    assert not clients.calls("scontrol requeue")
    verdict = RunRecord(run.workdir).verdict("lm")
    assert verdict.startswith("not requeued (setup, code 1)")
    assert re.search(said, verdict)


def test_lines_of_the_profile_that_belong_together_run_as_they_stand(
    clients: Clients, profile: Profile, make_run: MakeRun
) -> None:
    setup = [
        "if false; then",
        "  false",
        "else",
        '  echo "a \\',
        '    b"',
        "fi",
        "[[ -z $NEVER_SET ]] && echo unset",
    ]
    code, text = run_script(script_of(make_run("lines"), plain(profile, setup=setup), "true"), clients)
    assert code == 0, text
    assert "unset" in text


def test_our_calls_and_new_jobs_inherit_of_slurm_only_what_names_the_cluster(
    clients: Clients, profile: Profile, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    around = {
        "SLURM_TIME_FORMAT": "relative",
        "SLURM_CPU_BIND": "cores",
        "SLURM_MEM_PER_CPU": "100",
        "SLURM_DISTRIBUTION": "cyclic",
        "SBATCH_PARTITION": "other",
        "SQUEUE_FORMAT": "%A",
        "SCANCEL_INTERACTIVE": "1",
        "SLURM_JOB_END_TIME": "1",
        "RANK": "3",
        "PMIX_NAMESPACE": "x",
        "OMPI_COMM_WORLD_SIZE": "4",
    }
    passing = {
        "SLURM_CONF": "/etc/slurm.conf",
        "WANDB_API_KEY": "k",
        "NCCL_DEBUG": "INFO",
        "OMPI_MCA_btl": "tcp",
    }
    for name, value in {**around, **passing}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{clients.folder}:{os.environ['PATH']}")
    clients.write("squeue", "true")
    submit(make_run("inherit"), plain(profile), stages=["lm"])
    for client in ("squeue", "sbatch"):
        seen = dict(
            line.split("=", 1)
            for line in (clients.folder / f"{client}.env").read_text().splitlines()
            if "=" in line
        )
        assert not around.keys() & seen.keys()
        assert passing.items() <= seen.items()


def test_a_job_script_keeps_what_users_set_for_clients_from_its_calls(
    clients: Clients, profile: Profile, make_run: MakeRun
) -> None:
    settings = {"SLURM_TIME_FORMAT": "relative", "SQUEUE_FORMAT": "%A", "SLURM_CLUSTERS": "big", "RANK": "3"}
    work = "echo rank=$RANK job=$SLURM_JOB_ID; exit 75"
    code, text = run_script(script_of(make_run("calls"), plain(profile), work), clients, **settings)
    assert code == 0
    assert "rank= job=77" in text
    for client in ("squeue", "scontrol"):
        seen = (clients.folder / f"{client}.env").read_text()
        assert "SLURM_CLUSTERS=big" in seen
        assert not any(f"{name}=" in seen for name in ("SLURM_TIME_FORMAT", "SQUEUE_FORMAT", "SLURM_JOB_ID"))


def test_an_evaluation_that_the_site_refuses_is_asked_for_three_times(
    clients: Clients, profile: Profile, make_run: MakeRun
) -> None:
    run = make_run("evals")
    write_checkpoint(run, 4)
    clients.write("sbatch", "echo 'sbatch: error: Access denied' >&2; exit 1")
    asked = f"grep -c ^sbatch {shlex.quote(str(clients.folder / 'calls'))}"
    work = f"for _ in {{1..600}}; do (($({asked}) < 3)) || break; sleep 0.2; done; sleep 2"
    script = script_of(run, plain(profile, eval_each_checkpoint=True), work)
    script.write_text(script.read_text().replace("after 20 ask", "after 0.2 ask"))
    code, text = run_script(script, clients)
    assert code == 0
    assert len(clients.calls("sbatch")) == 3
    assert text.count("sbatch refused the evaluation of step 4: sbatch: error: Access denied") >= 1


def write_checkpoint(run: RunConfig, step: int) -> None:
    """A complete one, as the stand-in for a training writes it."""
    spec = importlib.util.spec_from_file_location("stand_in", Path(__file__).parent / "stand_in.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = run.workdir / "lm/checkpoints"
    folder.mkdir(parents=True)
    module.write_checkpoint(folder, step, run)


def exclude(run: RunConfig, *entries: tuple[str, float, str]) -> RunRecord:
    record = RunRecord(run.workdir)
    record.create()
    lines = [f"{node}\t{until:.0f}\t{reason}\n" for node, until, reason in entries]
    (record.state / "exclude").write_text("".join(lines))
    return record


def test_exclusions_end_and_can_be_lifted(profile: Profile, make_run: MakeRun, tmp_path: Path) -> None:
    run, soon = make_run("lift"), time.time() + EXCLUDE_SECONDS
    record = exclude(
        run, ("n1", time.time() - 5, "old"), ("n2", soon, "5 of 8 GPUs answer"), ("n3", soon, "errors")
    )
    assert [entry.node for entry in record.exclusions.current()] == ["n2", "n3"]
    shown = CliRunner().invoke(app, ["status", str(run.workdir)], env={"COLUMNS": "300"}).output
    assert "n2 (5 of 8 GPUs answer)" in shown
    assert "(old)" not in shown
    script = submit(run, profile(), dry_run=True, stages=["lm"]).jobs[0].script
    assert "#SBATCH --exclude=n2,n3\n" in script.read_text()
    assert record.exclusions.lift(["n2", "n9"]) == ["n2"]
    script = submit(run, profile(), dry_run=True, stages=["lm"]).jobs[0].script
    assert "#SBATCH --exclude=n3\n" in script.read_text()


@pytest.mark.parametrize(
    ("name", "text", "cause", "excluded"),
    [
        ("bad", "n2\\t5 of 8 GPUs answer\\n", "preflight", ["n2"]),
        ("check", "4 of 4 nodes: nvidia-smi was not found\\n", "check", []),
        ("late", "no answer within 120 s from n2\\n", "late", []),
    ],
)
def test_what_a_preflight_finds_decides_what_happens(
    clients: Clients,
    profile: Profile,
    make_run: MakeRun,
    name: str,
    text: str,
    cause: str,
    excluded: list[str],
) -> None:
    run = make_run("preflight")
    script = script_of(run, plain(profile, preflight=True), "true")
    clients.write("srun", f'printf "{text}" >"${{@: -1}}/{name}"; exit 1')
    code, said = run_script(script, clients)
    record = RunRecord(run.workdir)
    assert [life.cause for life in record.attempts("lm")] == [cause], said
    assert [entry.node for entry in record.exclusions.current()] == excluded
    assert bool(clients.calls("scontrol requeue")) == (cause != "check")
    assert code == (1 if cause == "check" else 0)
    if cause == "check":
        assert "nvidia-smi was not found" in record.verdict("lm")
    if excluded:
        assert clients.calls("scontrol update JobId=77 ExcNodeList=n2")


def test_gpus_are_tried_with_the_run_s_own_torch_before_it_trains(
    clients: Clients, profile: Profile, make_run: MakeRun
) -> None:
    run = make_run("gpus")
    cluster = plain(profile, preflight=True, gpus_per_node=2, cpus_per_node=8, stages={}, link_check=False)
    script = script_of(run, cluster, "echo trains")
    verdict = "4 of 4 nodes, n1 for one: torch 2.9 (built for CUDA 13.0) can use none"
    clients.write(
        "srun",
        f"""case "$*" in
*launchers.slurm.preflight*) ;;
*calm_scale.runtime.device_check*) printf '{verdict}\\n' >"${{@: -1}}/check"; exit 1 ;;
*) echo trains ;;
esac""",
    )
    code, said = run_script(script, clients)
    steps = clients.calls("srun")
    assert len(steps) == 2, said
    assert "--ntasks-per-node=2" in steps[1] and f"--config {run.workdir}" in steps[1]
    assert [life.cause for life in RunRecord(run.workdir).attempts("lm")] == ["check"]
    assert code == 1 and verdict in said and "trains" not in said
    unchecked = submit(run, plain(profile, preflight=True, gpus_per_node=0), dry_run=True, stages=["lm"])
    assert "device_check" not in unchecked.jobs[0].script.read_text()


@pytest.mark.parametrize(
    ("gpus", "shell", "environment", "connections"),
    [
        (2, {}, {}, "1"),
        (2, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, {}, "8"),
        (2, {}, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, "32"),
        (0, {}, {}, ""),
    ],
)
def test_gpu_jobs_have_settings_that_shell_and_profile_can_change(
    clients: Clients,
    profile: Profile,
    make_run: MakeRun,
    gpus: int,
    shell: dict[str, str],
    environment: dict[str, str],
    connections: str,
) -> None:
    names = ["CUDA_DEVICE_MAX_CONNECTIONS", "TRITON_CACHE_DIR", "PYTORCH_CUDA_ALLOC_CONF"]
    names += ["TORCH_FR_BUFFER_SIZE", "SLURM_DISTRIBUTION"]
    asked = ":".join(f"${{{name}-}}" for name in names)
    cluster = plain(profile, gpus_per_node=gpus, cpus_per_node=8, stages={}, environment=environment)
    script = script_of(make_run("settings"), cluster, f"echo settings={asked}")
    _, said = run_script(script, clients, **shell)
    rest = "/tmp/calm-scale-triton-77:expandable_segments:True:2000:block" if gpus else ":::"
    assert f"settings={connections}:{rest}" in said
