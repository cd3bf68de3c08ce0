"""A real SLURM for the tests: munged, slurmctld and two slurmd on this machine, in a folder of their own.

It needs root and Debian's `slurm-wlm` and `munge`; elsewhere these tests are skipped in plain sight. Nothing of an
installed SLURM is touched: own configuration, ports, key and state.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from calm_scale.config import RunConfig
from calm_scale.config.cluster import ClusterConfig

BINARIES = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
SBIN = "/usr/sbin:/sbin"
NODES = ("n1", "n2")
PATIENCE = 1200  # seconds

CONFIGURATION = """
ClusterName=calmtest
SlurmctldHost={host}
SlurmctldAddr=127.0.0.1
SlurmctldPort={ctld_port}
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=5
SlurmdTimeout=8
InactiveLimit=0
MinJobAge=600
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SchedulerType=sched/backfill
MailProg=/bin/true
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_port},{second_port}] CPUs=8 State=UNKNOWN
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=01:00:00 OverTimeLimit=0 State=UP
"""


class Slurm:
    """The running cluster: its environment for clients, and what tests do to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        path = os.pathsep.join([os.environ["PATH"], SBIN])
        self.env = {
            **os.environ,
            "PATH": path,
            "SLURM_CONF": str(root / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
        }
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._stop = threading.Event()
        self._states: dict[str, str] = {}

    def start(self) -> None:
        """Configuration, key, daemons; returns when both nodes are idle."""
        (self.root / "state").mkdir()
        (self.root / "munge.key").write_bytes(os.urandom(1024))
        (self.root / "munge.key").chmod(0o400)
        ports = free_ports(3)
        text = CONFIGURATION.format(
            host=socket.gethostname().split(".")[0],
            root=self.root,
            ctld_port=ports[0],
            first_port=ports[1],
            second_port=ports[2],
        )
        (self.root / "slurm.conf").write_text(text)
        for node in NODES:  # both are this machine: a step's folder would have the same name on each
            (self.root / node).mkdir()
            (self.root / node / "slurm.conf").write_text(text)
            (self.root / node / "mpi.conf").write_text(f"PMIxCliTmpDirBase={self.root}/{node}\n")
        munge = ["munged", "--foreground", "--force", "--num-threads=2"]
        munge += [f"--{name}={self.root}/munge.{end}" for name, end in MUNGE_FILES.items()]
        self._daemon("munged", munge)
        self.wait_for((self.root / "munge.socket").exists, "munged's socket")
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        self.wait_for(lambda: self.run("sinfo", "-h", "-o", "%t %D").strip() == "idle 2", "two idle nodes")
        threading.Thread(target=self._follow_queue, daemon=True).start()

    def start_controller(self) -> None:
        """Start slurmctld, with the state that the last one left."""
        self._daemon("slurmctld", ["slurmctld", "-D", "-i"])

    def stop_controller(self) -> None:
        """End slurmctld: until it is started again nobody answers any client."""
        daemon = self.daemons.pop("slurmctld")
        daemon.terminate()
        daemon.wait(30)

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node."""
        self._daemon(node, ["slurmd", "-D", "-N", node, "-f", str(self.root / node / "slurm.conf")])

    def kill_node(self, node: str) -> None:
        """kill -9 of a slurmd and of everything that runs on its node: what a power cut does."""
        daemon = self.daemons.pop(node)
        there = [pid for pid in processes() if self._runs_on(pid, node)]
        keepers = {parent(pid) for pid in there}
        for victim in [daemon.pid, *(pid for pid in keepers if "slurmstepd" in cmdline(pid)), *there]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        daemon.wait()

    def run(self, *command: str, check: bool = True) -> str:
        """A client command's output."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=180, check=False)
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}: {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def state(self, job: str) -> str:
        """State of a job (of an array's first task) as the controller had it half a second ago."""
        self.wait_for(lambda: bool({job, f"{job}_0"} & set(self._states)), f"news of job {job}")
        return self._states.get(job) or self._states[f"{job}_0"]

    @staticmethod
    def wait_for(condition: Callable[[], bool], what: str) -> None:
        """Poll until true. Only a fault takes ``PATIENCE``: a busy machine makes a test late, not wrong."""
        end = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"waited {PATIENCE} s in vain for {what}")
            time.sleep(0.2)

    def wait_state(self, job: str, *states: str) -> str:
        """Wait until a job is in one of the states."""
        final = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        self.wait_for(lambda: self.state(job) in {*states, *final}, f"job {job} in {states}")
        state = self.state(job)
        assert state in states, f"job {job} is {state}\n{self.log_of(job)}"
        return state

    def log_of(self, job: str) -> str:
        """The end of a job's log."""
        fields = dict(
            f.split("=", 1) for f in self.run("scontrol", "show", "job", job).splitlines() if "=" in f
        )
        path = Path(next((v for k, v in fields.items() if k.strip() == "StdOut"), "/nowhere"))
        return path.read_text()[-4000:] if path.is_file() else ""

    def stop(self) -> None:
        """End all jobs and daemons."""
        self._stop.set()
        self.run("scancel", "--user", "root", check=False)
        deadline = time.monotonic() + 15
        while self.run("squeue", "-h", check=False).strip() and time.monotonic() < deadline:
            time.sleep(0.3)
        for daemon in reversed(list(self.daemons.values())):
            with contextlib.suppress(ProcessLookupError):
                daemon.terminate()
                try:
                    daemon.wait(5)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()

    def job_environ(self, pid: int) -> dict[str, str]:
        """The environment of a process of one of this cluster's jobs; of any other process, nothing."""
        around = environ(pid)
        return around if self.root in Path(around.get("SLURM_CONF", "")).parents else {}

    def ranks_of(self, job: str, command: str) -> list[int]:
        """Processes of a job's ranks that run a command of ours, lowest rank first."""
        found = []
        for pid in processes():
            around, arguments = self.job_environ(pid), cmdline(pid).split()
            started = {"SLURM_STEP_ID", "SLURM_PROCID"} <= around.keys() and "srun" not in arguments[0]
            if started and around.get("SLURM_JOB_ID") == job and command in arguments:
                found.append((int(around["SLURM_PROCID"]), pid))
        return [pid for _, pid in sorted(found)]

    def script_of(self, job: str) -> int:
        """The process of a job's script itself, not of what it has started."""
        return next(
            pid
            for pid in processes()
            if self.job_environ(pid).get("SLURM_JOB_ID") == job
            and "slurm_script" in cmdline(pid)
            and "slurmstepd" in cmdline(parent(pid))
        )

    def _runs_on(self, pid: int, node: str) -> bool:
        return self.job_environ(pid).get("SLURMD_NODENAME") == node

    def _daemon(self, name: str, command: list[str]) -> None:
        with (self.root / f"{name}.out").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _follow_queue(self) -> None:
        """Ask for all jobs at once (a controller asked by every test ten times a second drops calls).

        A requeued job is held for two minutes, which no test has; but one that starts in the very second of its
        requeue is refused ("credential revoked"): it is let go after three.
        """
        seen: dict[str, float] = {}
        while not self._stop.wait(0.4):
            text = self.run("squeue", "-h", "-r", "-t", "all", "-o", "%i|%T|%r|%A", check=False)
            lines = [line.split("|") for line in text.splitlines() if line.count("|") == 3]
            self._states = {**self._states, **{job: state for job, state, _, _ in lines}}
            held = {
                number for _, state, reason, number in lines if (state, reason) == ("PENDING", "BeginTime")
            }
            seen = {number: seen.get(number, time.monotonic()) for number in held}
            for number, since in seen.items():
                if time.monotonic() - since > 3:
                    self.run("scontrol", "update", f"JobId={number}", "StartTime=now", check=False)


MUNGE_FILES = {
    "key-file": "key",
    "socket": "socket",
    "pid-file": "pid",
    "log-file": "log",
    "seed-file": "seed",
}


def free_ports(count: int) -> list[int]:
    """Ports free now, below the ephemeral range."""
    found: list[int] = []
    for port in range(17_000 + os.getpid() % 2_000, 32_000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) and len(found) < count:
                found.append(port)
        if len(found) == count:
            break
    return found


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def environ(pid: int) -> dict[str, str]:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in raw.split("\0") if "=" in entry)


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """The cluster, for the tests of one file; our environment points at it as long."""
    search = os.pathsep.join([os.environ["PATH"], SBIN])
    missing = [name for name in BINARIES if shutil.which(name, path=search) is None]
    reason = ""
    if missing:
        reason = f"no SLURM here ({', '.join(missing)} missing): apt-get install slurm-wlm munge libpmix-dev"
    elif os.geteuid() != 0:
        reason = "starting a SLURM needs root"
    if reason and os.environ.get("CALM_SCALE_REQUIRE_SLURM"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    root = Path(tempfile.mkdtemp(prefix="calm-slurm-"))
    root.chmod(0o755)
    cluster = Slurm(root)
    before = dict(os.environ)
    os.environ.update(cluster.env)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        os.environ.clear()
        os.environ.update(before)
        if "CALM_SCALE_KEEP_SLURM" not in before:  # its logs, for a look at what went wrong
            shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that runs `tests/slurm/stand_in.py` where a job runs `calm_scale`, and is Python otherwise."""
    script = tmp_path_factory.mktemp("bin") / "python"
    here = Path(__file__).parent
    script.write_text(
        f"""#!/bin/bash
export PYTHONPATH='{here.parents[1]}:{here}'
if [[ $3 == calm_scale ]]; then exec '{sys.executable}' -m "$2" stand_in "${{@:4}}"; fi
exec '{sys.executable}' "$@"
"""
    )
    script.chmod(0o755)
    return script


@pytest.fixture(scope="session")
def profile(stand_in: Path) -> Callable[..., ClusterConfig]:
    """A profile of the test cluster; keywords change it."""

    def make(**changes: Any) -> ClusterConfig:
        values: dict[str, Any] = {
            "name": "calmtest",
            "partition": "main",
            "cpus_per_node": 8,
            "max_time": "00:05:00",
            "python": str(stand_in),
            "environment": {
                "CALM_SCALE_MASTER_ADDR": "127.0.0.1",  # both nodes are this machine
                "CALM_SCALE_ALLOW_LOOPBACK": "1",
                "OMP_NUM_THREADS": "1",
            },
            "stages": {
                "prep": {"tasks_per_node": 2, "cpus_per_task": 1},
                "autoencoder": {"nodes": 2, "cpus_per_task": 1},
                "lm": {"nodes": 2, "cpus_per_task": 1},
                "eval": {"cpus_per_task": 1},
            },
            "requeue": {"notice_seconds": 30, "end_others_seconds": 3},
            "min_free_gigabytes": 0.001,
            "setup": ['echo "site: $NEVER_SET_ANYWHERE"'],  # as module files and conda do
        }
        return ClusterConfig.model_validate({**values, **changes})

    return make


@pytest.fixture(scope="session")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunConfig]:
    """A run for the stand-in stages; ``behaviour`` tells each stage what to do."""

    def make(name: str, behaviour: dict[str, dict[str, float]] | None = None, **changes: Any) -> RunConfig:
        workdir = tmp_path_factory.mktemp("runs") / f"{name} run"
        workdir.mkdir()
        (workdir / "behaviour.json").write_text(json.dumps(behaviour or {}))
        training = {"steps": 10, "global_batch": 4}
        values: dict[str, Any] = {
            "name": name,
            "workdir": str(workdir),
            "vocab_size": 64,
            "patch_size": 2,
            "prep": {"sources": [{"paths": ["text.jsonl"]}], "sequence_length": 4096},
            "autoencoder": {"training": training, "zero": {"data": 2}},
            "lm": {
                "backbone": {
                    "num_layers": 2,
                    "hidden_size": 16,
                    "ffn_size": 32,
                    "num_heads": 2,
                    "positions": 4,
                },
                "training": training,
                "parallel": {"tensor": 2, "data": 1},
            },
        }
        return RunConfig.model_validate({**values, **changes})

    return make
