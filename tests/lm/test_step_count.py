"""The first update after a resume is that of a run that was never stopped, wherever AdamW keeps its count."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from fused_adam_twin import GroupStepAdam, IntegerStepAdam, TensorStepAdam
from lm_ranks import tiny_run
from megatron.core import optimizer as megatron_optimizers
from rank_program import FixedCodec, batch_of

from calm_scale.config import RunConfig
from calm_scale.training.engine import no_steps, set_step_count
from calm_scale.training.megatron.engine import MegatronEngine
from calm_scale.training.megatron.optimizer import use_fused_kernel

WORLD = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))


def weights(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.models[0].named_parameters()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("adam", [GroupStepAdam, TensorStepAdam, IntegerStepAdam, torch.optim.AdamW])
def test_the_update_after_a_load_is_that_of_the_uninterrupted_run(
    adam: type[torch.optim.Optimizer], precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron_optimizers, "Adam", adam)
    monkeypatch.setattr(megatron_optimizers, "USING_PYTORCH_OPTIMIZER", adam is torch.optim.AdamW)
    run = RunConfig.model_validate(tiny_run(training={"precision": precision}))
    first = MegatronEngine(run, WORLD, FixedCodec(101))
    assert any(type(c.optimizer) is adam for c in first.optimizer.inner.chained_optimizers)
    for step in range(1, 21):
        first.train_step(batch_of(first, run, step), 1e-2)
    first.save(tmp_path)
    first.train_step(batch_of(first, run, 21), 1e-2)
    expected = weights(first)
    second = MegatronEngine(run, WORLD, FixedCodec(101))
    second.load(tmp_path)
    assert second.steps == 20
    second.train_step(batch_of(second, run, 21), 1e-2)
    got = weights(second)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    dist.destroy_process_group()


def test_torchs_fused_kernel_updates_and_resumes_alike(tmp_path: Path) -> None:
    """Switched on as for a GPU, where it is the default; the CPU has this kernel too."""
    run = RunConfig.model_validate(tiny_run())
    plain, fused, resumed = (MegatronEngine(run, WORLD, FixedCodec(101)) for _ in range(3))
    for engine in (fused, resumed):
        use_fused_kernel(engine.optimizer.inner)
    for step in (1, 2, 3):
        for engine in (plain, fused):
            engine.train_step(batch_of(engine, run, step), 1e-3)
    expected, got = weights(plain), weights(fused)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-6, msg=name)
    fused.save(tmp_path)
    resumed.load(tmp_path)
    for engine in (fused, resumed):
        engine.train_step(batch_of(engine, run, 4), 1e-3)
    expected, got = weights(fused), weights(resumed)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    dist.destroy_process_group()


def test_a_count_keeps_the_type_and_place_that_it_has() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    adam = GroupStepAdam([weight])
    adam.state[weight] = {"step": 3, "exp_avg": torch.zeros(2)}
    adam.param_groups[0]["step"] = torch.tensor([3], dtype=torch.int32)
    set_step_count(adam, 7)
    assert adam.state[weight]["step"] == 7 and isinstance(adam.state[weight]["step"], int)
    assert torch.equal(adam.param_groups[0]["step"], torch.tensor([7], dtype=torch.int32))


@pytest.mark.parametrize("settings", [{"fused": True}, {"capturable": True}])
def test_a_fused_optimizers_count_lies_on_its_parameters_device(settings: dict[str, bool]) -> None:
    weight = torch.nn.Parameter(torch.ones(2, device="meta"))
    assert no_steps(SimpleNamespace(defaults=settings), weight).device.type == "meta"
    assert no_steps(torch.optim.AdamW([weight]), weight).device.type == "cpu"


def test_torchs_groups_get_no_count_that_torch_does_not_keep() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    adam = torch.optim.AdamW([weight])
    set_step_count(adam, 7)
    assert "step" not in adam.param_groups[0]
