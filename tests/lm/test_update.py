"""The update is AdamW as written in its paper: groups, clipping, learning rate; and V splits over any TP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lm_ranks import tiny_run
from megatron.core.utils import local_multi_tensor_l2_norm
from rank_program import FixedCodec, batch_of

from calm_scale.config import ConfigError, RunConfig
from calm_scale.lm import token_layers
from calm_scale.runtime import cuda_on_cpu
from calm_scale.training.engine import Batch
from calm_scale.training.megatron.engine import MegatronEngine
from calm_scale.training.megatron.optimizer import norm_on_device

WORLD = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))


@pytest.fixture
def engine() -> Iterator[MegatronEngine]:
    run = RunConfig.model_validate(tiny_run(training={"optimizer": {"weight_decay": 0.5}}))
    yield MegatronEngine(run, WORLD, FixedCodec(101))
    dist.destroy_process_group()


def test_steps_are_adamw_with_no_decay_on_vectors(engine: MegatronEngine) -> None:
    (model,) = engine.models
    names = dict(model.named_parameters())
    expected = {name: p.detach().clone() for name, p in names.items()}
    first = {name: torch.zeros_like(p) for name, p in expected.items()}
    second = {name: torch.zeros_like(p) for name, p in expected.items()}
    for step, lr in enumerate((1e-2, 3e-3, 5e-3), start=1):
        result = engine.train_step(batch_of(engine, engine._run, step), lr)
        gradients = {name: p.main_grad.clone() for name, p in names.items()}  # after clipping, in place
        norm = torch.sqrt(sum(g.square().sum() for g in gradients.values()))
        assert norm.item() == pytest.approx(min(0.05, result.grad_norm), rel=1e-4)
        for name, g in gradients.items():
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.95 * second[name] + 0.05 * g.square()
            change = (first[name] / (1 - 0.9**step)) / ((second[name] / (1 - 0.95**step)).sqrt() + 1e-8)
            decay = 0.5 if expected[name].dim() > 1 else 0.0
            expected[name] = expected[name] - lr * (decay * expected[name] + change)
    for name, p in names.items():
        torch.testing.assert_close(p.detach(), expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_the_norm_is_megatrons_to_the_bit() -> None:
    cuda_on_cpu.install()
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        sizes = torch.randint(1, 3000, (20,), generator=generator).tolist()
        tensors = [3 * torch.randn(size, generator=generator) for size in sizes]
        theirs, _none = local_multi_tensor_l2_norm(0, torch.zeros(1), [tensors], False)
        ours, _none = norm_on_device(0, torch.zeros(1), [tensors], False)
        assert torch.equal(ours, theirs)


def test_evaluation_changes_neither_weights_nor_later_noise(engine: MegatronEngine) -> None:
    batch = batch_of(engine, engine._run, 1)
    before = engine._pass(batch, forward_only=True, namespace="train", step=1)
    assert engine.evaluate([batch]) == engine.evaluate([batch])
    assert engine._pass(batch, forward_only=True, namespace="train", step=1) == before


def test_no_batches_to_evaluate_is_an_error(engine: MegatronEngine) -> None:
    with pytest.raises(ConfigError, match="eval_samples"):
        engine.evaluate([])


@pytest.mark.parametrize("pad_id", [None, 7])
def test_sequences_that_only_fill_an_evaluation_batch_do_not_count(
    pad_id: int | None, engine: MegatronEngine
) -> None:
    engine._pad_id = pad_id
    batch = batch_of(engine, engine._run, 1)
    counted = torch.arange(batch.sample_ids.numel()).view_as(batch.sample_ids) < 3
    assert counted.numel() > 3
    filled = replace(batch, counted=counted)
    alone = Batch(1, batch.tokens.flatten(0, 1)[:3, None], batch.sample_ids.flatten()[:3, None])
    assert engine.evaluate([filled])["loss"] == pytest.approx(engine.evaluate([alone])["loss"], rel=1e-5)
    whole = engine.evaluate([replace(batch, counted=torch.ones_like(counted))])
    assert whole == engine.evaluate([batch]) != engine.evaluate([filled])


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("vocab", [5, 101, 128])
def test_any_vocabulary_splits_over_any_tensor_parallel_size(
    monkeypatch: pytest.MonkeyPatch, vocab: int, size: int
) -> None:
    from megatron.core import parallel_state

    num_rows = token_layers.padded_size(vocab, size) // size
    monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda: 0)
    covered: list[int] = []
    for rank in range(size):
        monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        for shard in token_layers.unpadded_shard("table", torch.zeros(num_rows, 4), vocab).values():
            assert shard.global_shape == (vocab, 4)
            covered += range(shard.global_offset[0], shard.global_offset[0] + shard.local_shape[0])
    assert covered == list(range(vocab))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parallel": {"tensor": 2}, "backbone": {"positions": 9}}, "9 positions do not divide"),
        (
            {"parallel": {"tensor": 2, "head_parallelism": "tensor"}, "head": {"kind": "flow"}},
            "needs position",
        ),
        (
            {"parallel": {"pipeline": 2, "virtual_pipeline": 2, "data": 1}, "training": {"micro_batch": 4}},
            "in a multiple of",
        ),
    ],
)
def test_a_layout_that_cannot_work_is_refused_by_the_configuration(
    change: dict[str, Any], message: str
) -> None:
    raw = tiny_run()
    for section, values in change.items():
        raw["lm"][section] = values if section == "head" else {**raw["lm"][section], **values}
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate(raw)
