"""The check of GPUs before a training: what torch, a kernel and a collective say, and whom the verdict blames."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from calm_scale.runtime import device_check
from calm_scale.runtime.world import World
from launchers import environment
from launchers.environment import RankFacts
from launchers.slurm.preflight import NodeReport

FACTS = RankFacts(0, 8, 0, 2, 0, 4, "n0", 29500, "slurm", "7", 0)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n0")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[0-3]")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(device_check, "choose_device", lambda *_: CPU)


def config(folder: Path, device: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(f"name: a\ndevice: {device}\n")
    return path


def test_a_gpu_that_multiplies_as_the_cpu_does_is_fine() -> None:
    report = device_check.examine(FACTS)
    assert (report.node, report.problem, report.is_common) == ("n0", "", False)


def test_a_gpu_that_multiplies_wrongly_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    product, calls = torch.Tensor.__matmul__, []

    def second_is_wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        calls.append(a)
        return product(a, b) * (1.0 if len(calls) == 1 else 1.02)

    monkeypatch.setattr(torch.Tensor, "__matmul__", second_is_wrong)
    report = device_check.examine(replace(FACTS, local_rank=1))
    assert report.problem.startswith("local rank 1: a matrix product on cpu is off by 2.0%. Node ")
    assert not report.is_common or torch.version.cuda is None


def test_whatever_a_driver_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "choose_device", lambda *_: torch.device("meta"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    report = device_check.examine(FACTS)
    assert "NotImplementedError" in report.problem
    for part in ("driver ", f"torch {torch.__version__} (built for CUDA 13.0)", "CUDA_VISIBLE_DEVICES 0,1"):
        assert part in report.problem
    assert not report.is_common, "other nodes tell whether it is this node's fault"


def test_a_torch_that_cannot_use_the_only_node_s_driver_excludes_no_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    report = device_check.examine(replace(FACTS, num_nodes=1))
    assert "can use none on" in report.problem and report.is_common


def reports(*bad: tuple[int, str], missing: int | None = None) -> list[NodeReport]:
    problems = dict(bad)
    ranks = [rank for rank in range(8) if rank != missing]
    return [NodeReport(f"n{rank // 2}", problems.get(rank, "")) for rank in ranks]


def test_a_node_has_the_fault_of_any_of_its_ranks_and_most_nodes_have_none() -> None:
    assert device_check.judge_ranks(reports(), FACTS).is_fine
    assert device_check.judge_ranks(reports((3, "off by 2%")), FACTS).bad == {"n1": "off by 2%"}
    common = device_check.judge_ranks(reports((1, "no"), (2, "no"), (7, "no")), FACTS)
    assert common.bad == {} and "3 of 4 nodes" in common.fault
    late = device_check.judge_ranks(reports(missing=5), FACTS)
    assert (late.late, late.bad) == (("n2",), {})


def test_a_collective_that_fails_is_a_fault_of_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = replace(FACTS, world_size=2, num_nodes=1, local_world_size=2)
    monkeypatch.setattr(environment, "facts", lambda: here)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n0")
    monkeypatch.setattr(device_check, "init_world", lambda *_, **__: World(0, 2, 0, 2, CPU, "gloo"))
    (tmp_path / "device-00001.json").write_text(json.dumps({"node": "n0"}))
    asked = ["--config", str(config(tmp_path, "auto")), "--folder", str(tmp_path)]

    def fails(_: torch.Tensor) -> None:
        raise dist.DistBackendError("NCCL error: no route\nsecond line")

    monkeypatch.setattr(dist, "all_reduce", fails)
    assert device_check.main(asked) == 1
    said = (tmp_path / "check").read_text()
    assert said.startswith(
        "the ranks' first all-reduce failed on n0: DistBackendError: NCCL error: no route. Node "
    )
    assert not (tmp_path / "bad").exists()
    (tmp_path / "check").unlink()
    monkeypatch.setattr(dist, "all_reduce", lambda total: total.add_(1))
    assert device_check.main(asked) == 0
    monkeypatch.setattr(dist, "all_reduce", lambda total: total.add_(3))
    assert device_check.main(asked) == 1
    assert "the sum is 3 instead of 1" in (tmp_path / "check").read_text()


def test_a_run_on_cpus_is_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "examine", lambda _: pytest.fail("it was"))
    assert device_check.main(["--config", str(config(tmp_path, "cpu")), "--folder", str(tmp_path)]) == 0
