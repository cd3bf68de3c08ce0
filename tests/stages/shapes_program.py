"""Random documents on one rank of a world: ``shapes_program.py STAGE EXAMPLES SEED``. Every rank draws the same ones.

A document is refused by validation (or by the layout check that a dry run makes for this number of ranks), or its
models are built and take one training step and one evaluation. The program fails at the first one with another end.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from calm_scale.autoencoder.model import Autoencoder
from calm_scale.config import ConfigError, RunConfig
from calm_scale.runtime.world import World, init_world
from calm_scale.stages.plan.dry_run import stage_plan
from calm_scale.training.deepspeed.engine import DeepSpeedEngine
from calm_scale.training.engine import Batch
from calm_scale.training.megatron.engine import MegatronEngine

Draw = Any
PRECISIONS = ("fp32", "bf16")


def one(draw: Draw, *options: Any) -> Any:
    return draw(st.sampled_from(options))


def mostly(draw: Draw, good: Sequence[Any], *bad: Any) -> Any:
    """One of ``good``; about one time in sixteen one of ``bad``, which does not fit what was drawn before."""
    return one(draw, *(bad if bad and one(draw, *[False] * 15, True) else good))


def training(draw: Draw, world_size: int) -> dict[str, Any]:
    micro, kind = one(draw, 1, 1, 2), one(draw, "constant", "cosine", "wsd")
    decay = mostly(draw, (5,), 0) if kind == "wsd" else one(draw, 0, 5)
    return {
        "steps": one(draw, 1, 9),
        "global_batch": mostly(draw, [micro * world_size * n for n in (1, 2, 4)], 1, 3),
        "micro_batch": micro,
        "precision": one(draw, *PRECISIONS),
        "optimizer": {
            "schedule": {"kind": kind, "warmup_steps": one(draw, 0, 3), "decay_steps": decay},
            "clip_norm": one(draw, 0, 1),
            "weight_decay": one(draw, 0, 0.1),
        },
    }


def autoencoder(draw: Draw, world_size: int) -> dict[str, Any]:
    posterior, stage = one(draw, "gaussian", "gaussian", "deterministic"), one(draw, 0, 1, 2, 3)
    return {
        "patches": one(draw, 1, 2, 4),
        "model": {
            "latent_size": one(draw, None, 1, 3, 8),
            "hidden_size": one(draw, 1, 2, 5, 8),
            "ffn_size": one(draw, 1, 3, 8),
            "encoder_layers": mostly(draw, (2, 4), 1),
            "decoder_layers": mostly(draw, (2, 4), 3),
        },
        "objective": {
            "posterior": posterior,
            "kl_weight": one(draw, 1e-3, 0) if posterior == "gaussian" else mostly(draw, (0,), 1e-3),
            "kl_floor": one(draw, 0, 0.5),
            "token_dropout": one(draw, 0, 0.15, 0.99),
            "latent_dropout": one(draw, 0, 0.15, 0.99),
            "masked_token": one(draw, "id_zero", "zero_embedding"),
        },
        "training": training(draw, world_size),
        "zero": {
            "stage": stage,
            "data": mostly(draw, (None, world_size), world_size + 1),
            "offload": one(draw, "none", "cpu") if stage else mostly(draw, ("none",), "cpu"),
        },
        "evaluation_noise": one(draw, [0.1], 0.5, []),
    }


def head(draw: Draw) -> dict[str, Any]:
    kind = one(draw, "energy", "energy", "flow", "diffusion", "softmax")
    blocks = {"num_blocks": one(draw, None, 1, 2)}
    repeats = {"num_repeats": one(draw, 1, 2), "sampling_steps": one(draw, 1, 3)}
    energy = {
        "noise_size": one(draw, 1, 3, 8),
        "num_samples": one(draw, 2, 3),
        "num_posterior": one(draw, 1, 3, 130),
        "alpha": one(draw, 0.5, 1, 1.5, 2),
    }
    return {
        "energy": {"kind": kind, **blocks, **energy},
        "flow": {"kind": kind, **blocks, **repeats},
        "diffusion": {"kind": kind, **blocks, **repeats, "train_timesteps": one(draw, 2, 10)},
        "softmax": {"kind": kind},
    }[kind]


def language_model(draw: Draw, world_size: int) -> dict[str, Any]:
    fits = [(t, p) for t in (1, 2, 4) for p in (1, 2, 4) if world_size % (t * p) == 0]
    tensor, pipeline = mostly(draw, fits, (3, 1), (2, 2))
    chunks = mostly(draw, (1, 1, 2) if pipeline > 1 else (1,), 2)
    heads, layers = tensor * one(draw, 1, 2, 3), pipeline * chunks * one(draw, 1, 2) + one(draw, 0, 1)
    listed = [1] * (pipeline * chunks - 1)
    shape = head(draw)
    return {
        "backbone": {
            "num_layers": layers,
            "hidden_size": heads * mostly(draw, (2, 4, 6, 8), 1, 3) + mostly(draw, (0,), 1),
            "ffn_size": mostly(draw, [tensor * n for n in (1, 4, 7)], 5),
            "num_heads": heads,
            "num_query_groups": mostly(draw, (None, tensor, heads), 2, 5),
            "positions": mostly(draw, [max(2, tensor * n) for n in (1, 2, 3)], 5),
            "norm_eps": one(draw, 1e-6, 1e-5),
        },
        "head": shape,
        "input_mode": mostly(
            draw, ("discrete",) if shape["kind"] == "softmax" else ("discrete", "continuous", "both"), "both"
        ),
        "training": training(draw, world_size),
        "parallel": {
            "tensor": tensor,
            "pipeline": pipeline,
            "virtual_pipeline": chunks,
            "data": mostly(draw, (None, max(1, world_size // (tensor * pipeline))), 3),
            "sequence_parallel": mostly(draw, (False, True) if tensor > 1 else (False,), True),
            "distributed_optimizer": one(draw, True, False),
            "recompute": one(draw, "none", "selective", "full"),
            "head_parallelism": mostly(
                draw, ("position", "tensor")[: 1 + (shape["kind"] == "energy")], "tensor"
            ),
            "pipeline_layout": mostly(
                draw,
                ("auto", [*listed, layers - len(listed)]),
                "even",
                [layers + 1],
                [*([0] * len(listed)), layers],
            ),
            "check_replicas": one(draw, False, True),
        },
    }


@st.composite
def documents(draw: Draw, stage: str, world_size: int) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": "random",
        "vocab_size": one(draw, 2, 5, 16, 33),
        "patch_size": one(draw, 1, 2, 3, 4),
        "autoencoder": autoencoder(draw, world_size),
    }
    if stage == "lm":
        document["lm"] = language_model(draw, world_size)
        if document["lm"]["head"]["kind"] == "softmax":
            document["patch_size"] = mostly(draw, (1,), 2)
    return document


def accepted(document: dict[str, Any], stage: Any, world_size: int) -> RunConfig | None:
    """The configuration; None where it is refused before a run on that many ranks."""
    try:
        config = RunConfig.model_validate(document)
    except ValidationError:
        return None
    if named_ranks(config, stage) not in (None, world_size):
        return None
    try:
        stage_plan(config, stage, world_size, chip=None)
    except ConfigError:
        if named_ranks(config, stage) is not None:
            raise  # the document alone told that it does not fit
        return None
    return config


def named_ranks(config: RunConfig, stage: str) -> int | None:
    """The world that the document asks for; None where it takes what it gets."""
    if stage == "autoencoder" or config.lm is None:
        return config.autoencoder.zero.data if config.autoencoder is not None else None
    parallel = config.lm.parallel
    return None if parallel.data is None else parallel.model_parallel * parallel.data


def batch(engine: Any, config: RunConfig, training: Any, patches: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    shape = (training.global_batch, patches * config.patch_size)
    tokens = torch.randint(config.vocab_size, shape, generator=generator)
    split = (-1, engine.data_size, training.micro_batch)
    mine = torch.arange(training.global_batch).view(*split)[:, engine.data_rank]
    return Batch(1, tokens[mine], mine)


def step(config: RunConfig, stage: str, world: World) -> None:
    """Build, train one step, evaluate; anything that is not a finite loss is an error."""
    ae, lm = config.autoencoder, config.lm
    if ae is None:
        raise AssertionError("every document has an autoencoder")
    engine: Any
    if stage == "autoencoder":
        engine = DeepSpeedEngine(
            ae, vocab_size=config.vocab_size, patch_size=config.patch_size, seed=0, world=world, pad_id=None
        )
        training, patches = ae.training, ae.patches
    elif lm is not None:
        codec = Autoencoder(ae.model, config.vocab_size, config.patch_size).eval().requires_grad_(False)
        engine = MegatronEngine(config, world, None if lm.predicts_tokens else codec)
        training, patches = lm.training, lm.backbone.positions
    data = batch(engine, config, training, patches)
    result = engine.train_step(data, 1e-4)
    if result.skipped or not math.isfinite(result.loss):
        raise AssertionError(f"the step gave {result}")
    found = engine.evaluate([data])
    if not all(math.isfinite(value) for value in found.values()):
        raise AssertionError(f"the evaluation gave {found}")


def main() -> None:
    stage, number, first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    world = init_world()
    ends: Counter[str] = Counter()

    @seed(first)
    @settings(
        max_examples=number,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(documents(stage, world.world_size))
    def every_document_ends_well(document: dict[str, Any]) -> None:
        try:
            config = accepted(document, stage, world.world_size)
            if config is None:
                ends["refused"] += 1
                return
            step(config, stage, world)
        except BaseException:
            sys.stderr.write(f"neither refused nor trained: {json.dumps(document)}\n")
            raise
        ends["trained"] += 1

    every_document_ends_well()
    if world.is_first:
        print(json.dumps(ends))
    world.close()


if __name__ == "__main__":
    main()
