"""Proof by counting: a tiny twin of a run, its real modules under torch's counter, beside the symbolic count."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from calm_scale.accounting.components import FLOPS_PER_MAC, Comparison, Component, parameters_of
from calm_scale.accounting.model_components import (
    autoencoder_components,
    lm_components,
    lm_parameters,
    model_of,
    recomputed,
)
from calm_scale.config.run import RunConfig

BATCH = 2
POSITIONS = 8
_LOSS_NOTE = (
    "the counter misses in-place products and sees the pairs of samples as an incidence product of N columns; "
    "the count takes l multiply-accumulates a pair"
)

_TABLE_NOTE = (
    "counted by the convention, but looked up in a table: for frozen weights it depends on the token alone"
)


def compare(config: RunConfig) -> list[Comparison]:
    """Run the twin of ``config`` forward and backward; every quantity per position (patch)."""
    import torch

    torch.manual_seed(0)
    twin = tiny_twin(config)
    found = _language_model(twin)
    if twin.lm is not None and not twin.lm.predicts_tokens:
        found += _autoencoder(twin)
    return found


def tiny_twin(config: RunConfig) -> RunConfig:
    """The run at tiny widths on one rank: same K, head, input mode, N, recomputation and grouping of heads."""
    lm, document = config.require_lm(), config.model_dump()
    group = lm.backbone.num_heads // lm.backbone.query_groups
    heads = 2 * group
    backbone: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 8 * heads,
        "ffn_size": 24,
        "num_heads": heads,
        "num_query_groups": 2,
        "positions": POSITIONS,
    }
    document["lm"]["backbone"] |= backbone
    document["lm"]["parallel"] = {"recompute": lm.parallel.recompute}
    document["lm"]["training"] |= {"global_batch": BATCH, "micro_batch": BATCH, "precision": "fp32"}
    document["lm"]["head"] = lm.head.tiny()
    document |= {"name": "twin", "vocab_size": 64, "prep": None}
    if document["autoencoder"] is not None:
        document["autoencoder"]["model"] |= {"hidden_size": 16, "ffn_size": 24, "latent_size": 12}
        document["autoencoder"]["zero"] = {}
        document["autoencoder"]["training"] |= {"global_batch": BATCH, "micro_batch": BATCH}
    return RunConfig.model_validate(document)


def _autoencoder(twin: RunConfig) -> list[Comparison]:
    import torch

    from calm_scale.autoencoder.model import Autoencoder

    model = Autoencoder(model_of(twin), twin.vocab_size, twin.patch_size)
    tokens = torch.randint(0, twin.vocab_size, (BATCH, POSITIONS, twin.patch_size))
    logits: list[torch.Tensor] = []
    forward = _count(lambda: logits.append(model.decode(model.encode(tokens)[0])))
    backward = _count(lambda: logits[0].sum().backward())
    components = autoencoder_components(twin)
    return [
        Comparison("autoencoder parameters", parameters_of(components), _size(model.unique_parameters())),
        Comparison("autoencoder training, forward", _flops(components, "forward"), forward),
        Comparison("autoencoder training, backward", _flops(components, "backward"), backward),
    ]


def _language_model(twin: RunConfig) -> list[Comparison]:
    import torch

    from calm_scale.autoencoder.model import Autoencoder
    from calm_scale.runtime.world import World
    from calm_scale.training.engine import Batch
    from calm_scale.training.megatron.engine import MegatronEngine

    codec = None
    if twin.lm is not None and not twin.lm.predicts_tokens:
        codec = Autoencoder(model_of(twin), twin.vocab_size, twin.patch_size).eval().requires_grad_(False)
    engine = MegatronEngine(twin, World(0, 1, 0, 1, torch.device("cpu"), "gloo"), codec)
    tokens = torch.randint(0, twin.vocab_size, (1, BATCH, POSITIONS * twin.patch_size))
    batch = Batch(step=0, tokens=tokens, sample_ids=torch.arange(BATCH)[None])
    engine.evaluate([batch])  # makes the frozen encoder's table
    forward = _count(lambda: engine.evaluate([batch]))
    both = _count(lambda: engine.train_step(batch, 1e-3))
    loss_forward, loss_both = _loss_alone(twin)
    executed = [c for c in lm_components(twin) if c.part != "loss" or not loss_both]
    looked_up = [c for c in executed if c.name.startswith("encoder.token.")]
    components = [c for c in executed if c not in looked_up]
    mode = twin.lm.parallel.recompute if twin.lm else "none"
    again = FLOPS_PER_MAC * sum(recomputed(c, mode) for c in components)
    hardware = _flops(components, "forward") + _flops(components, "backward") + again
    weights = (item for model in engine.models for item in model.named_parameters())
    found = [
        Comparison("language model parameters", lm_parameters(twin), _size(weights)),
        Comparison("language model, forward", _flops(components, "forward"), forward - loss_forward),
        Comparison("language model, forward and backward", hardware, both - loss_both),
    ]
    if looked_up:
        found.append(
            Comparison("frozen encoder, per-token half", _flops(looked_up, "forward"), 0, _TABLE_NOTE)
        )
    if loss_both:
        pairwise = [c for c in lm_components(twin) if c.part == "loss"]
        symbolic = _flops(pairwise, "forward") + _flops(pairwise, "backward")
        found.append(Comparison("energy loss, forward and backward", symbolic, loss_both, _LOSS_NOTE))
    return found


def _loss_alone(twin: RunConfig) -> tuple[int, int]:
    """Counted FLOPs per position of a loss that is itemised: forward only, with gradient."""
    run = twin.require_lm().head.loss_alone(twin, BATCH)
    if run is None:
        return 0, 0
    return _count(lambda: run(False)), _count(lambda: run(True))


def _count(work: Callable[[], Any]) -> int:
    """FLOPs per position. Attention runs as plain products, which the counter sees."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        work()
    per_position, rest = divmod(counter.get_total_flops(), BATCH * POSITIONS)
    if rest:
        raise ArithmeticError(
            f"{counter.get_total_flops()} counted FLOPs are not a multiple of the positions"
        )
    return int(per_position)


def _size(parameters: Iterable[tuple[str, Any]]) -> int:
    return sum(parameter.numel() for _, parameter in parameters)


def _flops(components: list[Component], direction: str) -> int:
    macs = (c.training_forward if direction == "forward" else c.training_backward for c in components)
    return FLOPS_PER_MAC * sum(macs)
