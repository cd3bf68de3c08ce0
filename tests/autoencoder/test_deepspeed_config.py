"""The DeepSpeed configuration: what we decide, what may be overridden, what is refused."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from calm_scale.config.autoencoder import AutoencoderStage, ZeroConfig
from calm_scale.config.errors import ConfigError
from calm_scale.config.training import TrainingConfig
from calm_scale.runtime.world import World
from calm_scale.training.deepspeed.engine import DeepSpeedEngine, _import_deepspeed
from calm_scale.training.deepspeed.setup import deepspeed_config


def stage(**zero: object) -> AutoencoderStage:
    training = TrainingConfig(steps=1, global_batch=48, micro_batch=4, optimizer={"clip_norm": 0.7})  # type: ignore[arg-type]
    return AutoencoderStage(training=training, zero=ZeroConfig(**zero))  # type: ignore[arg-type]


def test_batches_and_clipping_follow_our_settings() -> None:
    config = deepspeed_config(stage(stage=2), world_size=3, num_parameters=1000)
    assert config["train_batch_size"] == 48
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert config["gradient_accumulation_steps"] == 4
    assert config["gradient_clipping"] == 0.7
    assert config["zero_optimization"]["stage"] == 2
    assert config["zero_optimization"]["reduce_bucket_size"] == 1000


def test_stage_0_leaves_clipping_to_our_optimizer() -> None:
    assert deepspeed_config(stage(stage=0), 1, 1000)["gradient_clipping"] == 0.0


def test_overrides_are_merged_in_depth() -> None:
    overrides = {"zero_optimization": {"reduce_bucket_size": 7}, "comms_logger": {"enabled": True}}
    config = deepspeed_config(stage(stage=3, offload="cpu", overrides=overrides), 1, 1000)
    assert config["zero_optimization"]["reduce_bucket_size"] == 7
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert config["comms_logger"] == {"enabled": True}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"bf16": {"enabled": True}}, "overrides.bf16 is decided by training.precision"),
        ({"train_batch_size": 8}, "overrides.train_batch_size is decided by training.global_batch"),
        ({"zero_optimization": {"stage": 3}}, "overrides.zero_optimization.stage is decided by zero.stage"),
        ({"gradient_clipping": 1}, "training.optimizer.clip_norm"),
    ],
)
def test_keys_that_other_settings_decide_are_refused(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ZeroConfig(overrides=overrides)


def test_offload_needs_a_partitioned_optimizer() -> None:
    with pytest.raises(ValidationError, match="needs ZeRO stage 1, 2 or 3"):
        ZeroConfig(stage=0, offload="cpu")


@pytest.mark.parametrize(
    ("ranks", "zero", "message"),
    [(3, {"data": 2}, "zero.data is 2, but 3 ranks run"), (5, {}, "nearest that fit are 40 and 60")],
)
def test_ranks_that_do_not_fit_are_refused_at_start(
    ranks: int, zero: dict[str, object], message: str
) -> None:
    world = World(0, ranks, 0, ranks, torch.device("cpu"), "gloo")
    with pytest.raises(ConfigError, match=message):
        DeepSpeedEngine(stage(**zero), vocab_size=9, patch_size=1, seed=0, world=world)


def test_no_operation_of_deepspeed_is_tried_with_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed
    import torch.distributed as dist

    def try_them() -> None:
        raise AssertionError("the operations are tried")

    monkeypatch.setattr(deepspeed.ops, "_probe_compatible_ops", try_them, raising=False)
    monkeypatch.delitem(vars(deepspeed.ops), "__compatible_ops__", raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    _import_deepspeed(World(0, 1, 0, 1, torch.device("cpu"), "gloo"))
    from deepspeed.comm.torch import build_shm_op

    assert build_shm_op() is None
