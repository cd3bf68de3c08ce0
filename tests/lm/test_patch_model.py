"""The whole model on one rank: its backbone is a Llama, its cache changes nothing, its padding never shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lm_ranks import tiny_run
from plain_llama import hidden_states
from rank_program import FixedCodec

from calm_scale.config import ConfigError, RunConfig
from calm_scale.lm.build import build_models
from calm_scale.lm.patch_model import MegatronPatchModel, inference_layout, load_patch_model
from calm_scale.lm.pieces import pieces_of
from calm_scale.lm.sharded import CheckpointMismatchError
from calm_scale.runtime.finite import ModelOutputError


class Codec(FixedCodec):
    """Decodes a latent to the K ids whose vectors are nearest to it, one by one."""

    def decode_ids(self, latents: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(latents.flatten(0, -2), self.table).topk(2, largest=False).indices
        return nearest.view(*latents.shape[:-1], 2)


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    yield SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    if dist.is_initialized():
        dist.destroy_process_group()


def make(world: Any, run: RunConfig) -> MegatronPatchModel:
    single, layout = inference_layout(run, world)
    (model,) = build_models(single, layout)
    codec = None if run.lm.predicts_tokens else Codec(run.vocab_size)
    return MegatronPatchModel(model, single, codec)


def run_of(**changes: Any) -> RunConfig:
    raw = tiny_run(**changes)
    return RunConfig.model_validate(raw)


@pytest.fixture(scope="module")
def calm(world: Any) -> MegatronPatchModel:
    return make(world, run_of())


def tokens_of(model: MegatronPatchModel, batch: int, patches: int) -> torch.Tensor:
    shape = (batch, patches * model.patch_size)
    return torch.randint(model.vocab_size, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_backbone_is_the_llama_written_out(world: Any, groups: int) -> None:
    raw = tiny_run()
    raw["lm"]["backbone"]["num_query_groups"] = groups
    run = RunConfig.model_validate(raw)
    model = make(world, run)
    weights = {name: p.detach() for name, p in model._model.named_parameters()}
    tokens = tokens_of(model, 3, 8)
    expected = hidden_states(weights, tokens, run.lm.backbone, run.patch_size)
    torch.testing.assert_close(model.hidden(tokens), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cuts", [[8], [1] * 8, [3, 1, 4], [5, 3]])
def test_cache_equals_the_full_forward(calm: MegatronPatchModel, cuts: list[int]) -> None:
    tokens = tokens_of(calm, 2, 8)
    full = calm.hidden(tokens)
    patches = tokens.view(2, 8, calm.patch_size)
    state, done = calm.begin(2, 8), 0
    for cut in cuts:
        last = calm.advance(state, patches[:, done : done + cut])
        done += cut
        torch.testing.assert_close(last, full[:, done - 1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["continuous", "both"])
def test_input_modes_cache_too(world: Any, mode: str) -> None:
    raw = tiny_run()
    raw["lm"]["input_mode"] = mode
    model = make(world, RunConfig.model_validate(raw))
    tokens = tokens_of(model, 2, 6)
    full, state = model.hidden(tokens), model.begin(2, 6)
    model.advance(state, tokens.view(2, 6, 2)[:, :4])
    last = model.advance(state, tokens.view(2, 6, 2)[:, 4:])
    torch.testing.assert_close(last, full[:, -1], rtol=1e-5, atol=1e-5)


def test_the_cache_refuses_more_than_it_holds(calm: MegatronPatchModel) -> None:
    state = calm.begin(1, 2)
    with pytest.raises(ValueError, match="exceed the 2"):
        calm.advance(state, torch.zeros(1, 3, 2, dtype=torch.long))


def test_a_longer_sequence_than_trained_on_is_read(calm: MegatronPatchModel) -> None:
    tokens = tokens_of(calm, 1, 20)
    torch.testing.assert_close(calm.hidden(tokens)[:, :8], calm.hidden(tokens[:, :16]), rtol=1e-5, atol=1e-5)


def test_the_future_changes_nothing(calm: MegatronPatchModel) -> None:
    tokens = tokens_of(calm, 1, 8)
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 101
    torch.testing.assert_close(calm.hidden(tokens)[:, :5], calm.hidden(changed)[:, :5], rtol=0, atol=0)


def test_draws_are_patches_of_true_ids(calm: MegatronPatchModel) -> None:
    hidden = calm.hidden(tokens_of(calm, 2, 4))
    drawn = calm.draw(hidden, 3, torch.Generator().manual_seed(0))
    assert drawn.shape == (3, 2, 4, 2)
    assert drawn.max() < 101
    again = calm.draw(hidden, 3, torch.Generator().manual_seed(0))
    assert torch.equal(drawn, again)


def test_baseline_draws_follow_its_law(world: Any) -> None:
    model = make(world, run_of(head={"kind": "softmax"}))
    hidden = model.hidden(tokens_of(model, 1, 4))[0, -1]
    law = model.log_probs(hidden).exp()
    assert law.shape == (101,)
    assert law.sum().item() == pytest.approx(1, abs=1e-5)
    drawn = model.draw(hidden, 20_000, torch.Generator().manual_seed(0))
    assert drawn.shape == (20_000, 1)
    counts = torch.bincount(drawn.view(-1), minlength=101) / 20_000
    assert (counts - law).abs().max() < 0.02


def test_a_generative_model_has_no_token_law(calm: MegatronPatchModel) -> None:
    with pytest.raises(ConfigError, match="autoregressive baseline"):
        calm.log_probs(torch.zeros(32))


def test_stand_in_stays_away_from_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from calm_scale.runtime import cuda_on_cpu

    monkeypatch.setattr(cuda_on_cpu, "_installed", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cuda_on_cpu.install() is False


def test_padded_rows_are_as_if_they_were_not_there(world: Any, tmp_path: Path) -> None:
    """Plant large values in rows beyond V of the output layer: neither law nor loss changes."""
    from calm_scale.lm.token_layers import VocabularyOutput

    model = make(world, run_of(head={"kind": "softmax"}))
    output = model._model.head
    assert isinstance(output, VocabularyOutput)
    hidden = model.hidden(tokens_of(model, 1, 4)).transpose(0, 1)
    targets = torch.tensor([[1, 2, 3, 4]])
    loss = output.loss(hidden, targets)
    output.linear.weight = torch.nn.Parameter(torch.cat([output.linear.weight, torch.full((3, 32), 50.0)]))
    torch.testing.assert_close(output.loss(hidden, targets), loss)
    assert model.log_probs(hidden[0, 0]).shape == (101,)


@pytest.mark.ranks
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("saved", "base"), [("again_tp2pp2_from_one", "half_one"), ("ckpt_tp2_head", "ckpt_tp2_head")]
)
def test_a_checkpoint_of_any_layout_is_one_model(reports: Any, world: Any, saved: str, base: str) -> None:
    model = load_patch_model(run_of(tensor=2, pipeline=2), reports.out / saved, world, Codec(101))
    stored = reports.tensors(base)
    for piece in pieces_of([model._model]):
        assert torch.equal(piece.of(piece.parameter), piece.cut(stored[f"model.{piece.key}"]))


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_a_bf16_checkpoint_is_read_in_fp32_on_a_cpu(reports: Any, world: Any) -> None:
    run = run_of(training={"precision": "bf16"})
    model = load_patch_model(run, reports.out / "ckpt_dp2_bf16", world, Codec(101))
    hidden = model.hidden(tokens_of(model, 1, 8))
    assert hidden.dtype == torch.float32
    assert torch.isfinite(hidden).all()


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_another_model_is_not_loaded(reports: Any, world: Any) -> None:
    with pytest.raises(CheckpointMismatchError, match=r"head\.linear"):
        load_patch_model(run_of(head={"kind": "softmax"}), reports.out / "half_one", world, None)


@pytest.mark.parametrize("head", ["energy", "softmax"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_never_leave_the_model(head: str, value: float, world: Any) -> None:
    model = make(world, run_of(head={"kind": "softmax"}) if head == "softmax" else run_of())
    tokens = tokens_of(model, 1, 4)
    good = model.hidden(tokens)
    with torch.no_grad():
        next(p for name, p in model._model.named_parameters() if "final_layernorm" in name).fill_(value)
    with pytest.raises(ModelOutputError, match=r"the model's output is not finite: .* of its hidden states"):
        model.hidden(tokens)
    with pytest.raises(ModelOutputError, match="hidden states"):
        model.advance(model.begin(1, 4), tokens.view(1, 4, -1))
    with torch.no_grad():
        for parameter in model._model.head.parameters():
            parameter.fill_(value)
    with pytest.raises(ModelOutputError, match="latents" if head == "energy" else "log-probabilities"):
        model.draw(good[:, -1], 2, torch.Generator().manual_seed(0))
