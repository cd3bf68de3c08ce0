"""The real stages, tiny, as a chain on a real SLURM: through a killed rank and two time limits to the evaluation."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from calm_scale.config import RunConfig, to_yaml
from calm_scale.config.cluster import ClusterConfig
from data_prep.prep import prepare
from launchers.slurm.record import RunRecord
from launchers.slurm.submit import submit

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]
STEPS = 12


def tiny() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_run", Path(__file__).parent / "tiny_run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(run: RunConfig, stage: str) -> dict[int, dict[str, Any]]:
    """Training rows by step; a later attempt's row wins."""
    path = run.workdir / stage / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    values = [json.loads(line) for line in lines if line.endswith("}")]
    return {value["step"]: value for value in values if "step" in value and "loss" in value}


class HoldUntilTold(threading.Thread):
    """Pauses the ranks of a job after their first steps until their script is told to stop: twice.

    However fast this machine is, the run then meets its time limit at least twice.
    """

    def __init__(self, slurm: Any, run: RunConfig, job: str, times: int = 2) -> None:
        super().__init__(daemon=True)
        self.slurm, self.run_config, self.job, self.times = slurm, run, job, times
        self.finished = threading.Event()

    def run(self) -> None:
        record = RunRecord(self.run_config.workdir)
        log = record.folder / "logs" / f"lm-{self.job}.log"
        for _ in range(self.times):
            before = max(rows(self.run_config, "lm"), default=0)
            while max(rows(self.run_config, "lm"), default=0) <= before:
                if self.finished.wait(0.02):
                    return
            held = self.slurm.ranks_of(self.job, "train-lm")
            told = log.read_text().count("told to stop")
            for pid in held:
                os.kill(pid, signal.SIGSTOP)
            while log.read_text().count("told to stop") == told and not self.finished.wait(0.2):
                pass
            for pid in held:
                os.kill(pid, signal.SIGCONT)
            attempt = len(record.attempts("lm"))
            while len(record.attempts("lm")) == attempt and not self.finished.wait(0.2):
                pass


def test_real_chain(slurm, tmp_path: Path, profile: Callable[..., ClusterConfig]) -> None:
    tiny().write_corpus(tmp_path)
    values = tiny().tiny_config(tmp_path, steps=STEPS)
    values["autoencoder"]["training"] = {**values["autoencoder"]["training"], "checkpoint": {"interval": 2}}
    run = RunConfig.model_validate({"name": "real", "workdir": str(tmp_path / "real run"), **values})
    run.workdir.mkdir()
    cluster = profile(
        python=sys.executable,
        stages={
            "prep": {"tasks_per_node": 2, "cpus_per_task": 1},
            "autoencoder": {"nodes": 2, "cpus_per_task": 1},
            "lm": {"nodes": 2, "cpus_per_task": 1, "time": "00:02:00"},
            "eval": {"cpus_per_task": 1},
        },
        requeue={"notice_seconds": 50, "end_others_seconds": 3, "max_attempts_without_progress": 20},
    )
    jobs = {job.stage: job.job_id or "" for job in submit(run, cluster).jobs}
    holder = HoldUntilTold(slurm, run, jobs["lm"])
    holder.start()
    try:
        slurm.wait_state(jobs["prep"], "COMPLETED")
        prep_log = (run.workdir / "slurm/logs" / f"prep-{jobs['prep']}/attempt_001/rank_0000.log").read_text()
        assert "workers: 2" in prep_log, "two MPI ranks shared the work"
        kill_a_rank(slurm, run, jobs["autoencoder"])
        slurm.wait_state(jobs["autoencoder"], "COMPLETED")
        slurm.wait_state(jobs["lm"], "COMPLETED")
        slurm.wait_state(jobs["eval"], "COMPLETED")
    finally:
        holder.finished.set()
    record = RunRecord(run.workdir)
    assert "crash" in [life.cause for life in record.attempts("autoencoder")]
    limits = [life for life in record.attempts("lm") if life.cause == "limit"]
    assert len(limits) >= 2
    assert record.attempts("lm")[-1].cause == "finished"
    assert list((run.workdir / "eval").glob("step_*.json"))
    compare_with_unbroken(run, tmp_path)


def prepared_run(folder: Path, name: str) -> RunConfig:
    values = tiny().tiny_config(folder)
    run = RunConfig.model_validate({"name": name, "workdir": str(folder / name), **values})
    run.workdir.mkdir()
    return run


def test_prep_with_mpirun(slurm, tmp_path: Path, profile: Callable[..., ClusterConfig]) -> None:
    tiny().write_corpus(tmp_path)
    run = prepared_run(tmp_path, "mpirun")
    cluster = profile(python=sys.executable, mpi="mpirun", mpirun_options=["--allow-run-as-root"])
    job = submit(run, cluster, stages=["prep"]).jobs[0].job_id or ""
    slurm.wait_state(job, "COMPLETED")
    log = run.workdir / "slurm/logs" / f"prep-{job}/attempt_001/rank_0000.log"
    assert "workers: 2" in log.read_text()


def test_prep_on_two_nodes(slurm, tmp_path: Path, profile: Callable[..., ClusterConfig]) -> None:
    """One MPI rank on each of two nodes, started by srun, write what one process alone writes."""
    tiny().write_corpus(tmp_path)
    alone = prepared_run(tmp_path, "alone")
    prepare(alone)
    run = prepared_run(tmp_path, "pair")
    stages = {"prep": {"nodes": 2, "tasks_per_node": 1, "cpus_per_task": 1}}
    job = (
        submit(run, profile(python=sys.executable, mpi="pmix", stages=stages), stages=["prep"]).jobs[0].job_id
        or ""
    )
    slurm.wait_state(job, "COMPLETED")
    logs = run.workdir / f"slurm/logs/prep-{job}/attempt_001"
    assert "workers: 2" in (logs / "rank_0000.log").read_text()
    assert (logs / "rank_0001.log").exists()
    shards = sorted(file.relative_to(alone.data_dir) for file in alone.data_dir.rglob("*.shard"))
    assert shards
    for shard in shards:
        assert (run.data_dir / shard).read_bytes() == (alone.data_dir / shard).read_bytes()


def test_tasks_without_mpi_write_nothing(slurm, tmp_path: Path) -> None:
    tiny().write_corpus(tmp_path)
    run = prepared_run(tmp_path, "lonely")
    file = tmp_path / "lonely.yaml"
    file.write_text(to_yaml(run))
    command = ["srun", "--ntasks=2", "--mpi=none", sys.executable, "-m", "calm_scale", "prep", str(file)]
    done = subprocess.run(command, env=slurm.env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode != 0
    assert "2" in done.stderr
    assert "MPI" in done.stderr
    assert not run.data_dir.exists()


def kill_a_rank(slurm: Any, run: RunConfig, job: str) -> None:
    deadline = time.monotonic() + 120
    checkpoints = run.workdir / "autoencoder" / "checkpoints"
    while not list(checkpoints.glob("step_????????")):
        assert time.monotonic() < deadline, "the autoencoder wrote no checkpoint"
        time.sleep(0.02)
    pids = slurm.ranks_of(job, "train-ae")
    assert len(pids) == 2
    os.kill(pids[1], signal.SIGKILL)


def compare_with_unbroken(run: RunConfig, folder: Path) -> None:
    """Both stages without an interruption, started by our own launcher: equal to the last bit.

    Losses, norms, and at the end the weights and Adam's moments, of the autoencoder too.
    """
    unbroken = run.model_copy(
        update={"name": "unbroken", "workdir": folder / "unbroken", "data": run.data_dir}
    )
    file = folder / "unbroken.yaml"
    file.write_text(to_yaml(unbroken))
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    for stage in ("train-ae", "train-lm"):
        command = [sys.executable, "-m", "calm_scale", stage, str(file)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    broken, whole = rows(run, "lm"), rows(unbroken, "lm")
    assert sorted(broken) == sorted(whole) == list(range(1, STEPS + 1))
    for step, row in whole.items():
        assert (broken[step]["loss"], broken[step]["grad_norm"]) == (row["loss"], row["grad_norm"]), step
    for stage in ("autoencoder", "lm"):
        ours, theirs = state(run, stage), state(unbroken, stage)
        assert ours.keys() == theirs.keys()
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            assert sum(kind in re.split("[./]", key) for key in ours) > 5, (stage, sorted(ours)[:20])
        different = [key for key, tensor in ours.items() if not same_bits(tensor, theirs[key])]
        assert not different, (stage, different)


def state(run: RunConfig, stage: str) -> dict[str, Any]:
    """Every tensor of the last checkpoint, whole, by key: weights and optimizer state."""
    from safetensors.torch import load_file
    from torch import empty
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    shards = run.workdir / stage / "checkpoints" / f"step_{STEPS:08d}" / "shards"
    files = sorted(shards.glob("*.safetensors"))
    if files:
        return {key: tensor for file in files for key, tensor in load_file(file).items()}
    reader = FileSystemReader(shards)
    found = {
        key: empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if hasattr(entry, "size")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no process group here: that is meant
        load(found, storage_reader=reader, no_dist=True)
    return found


def same_bits(one: Any, other: Any) -> bool:
    """Equal to the last bit, signs of zeros included."""
    return one.dtype == other.dtype and one.numpy().tobytes() == other.numpy().tobytes()
