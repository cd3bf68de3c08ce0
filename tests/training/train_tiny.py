"""One rank of a tiny run: ``python train_tiny.py FOLDER '{"training": {…}, "engine": {…}}'``.

Prints ``ready`` once the signal handlers stand, and ends with the loop's exit code.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from calm_scale.runtime.departure import StopSignals

if __name__ == "__main__":
    stop = StopSignals().install()
    print("ready", flush=True)

import numpy as np
from numpy.typing import DTypeLike
from tiny_engine import TinyEngine

from calm_scale.checkpoint.card import Identity
from calm_scale.checkpoint.store import CheckpointStore
from calm_scale.config.errors import CalmScaleError
from calm_scale.config.training import LoggingConfig, TrainingConfig
from calm_scale.record.metrics import Row
from calm_scale.runtime.departure import Departure
from calm_scale.runtime.telemetry import Telemetry
from calm_scale.runtime.world import World, init_world
from calm_scale.training.attempt import Outcome, Start, Training, TrainingData, open_attempt
from calm_scale.training.batches import BatchPlan, EvaluationBatches, TrainingBatches
from calm_scale.training.loop import fit
from data_prep.shards.order import SampleOrder

SEQUENCES = 50


class Sequences:
    """``count`` sequences of 16 tokens, each a repeating pattern that can be learnt."""

    tokens_per_sample = 16

    def __init__(self, count: int = SEQUENCES) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> np.ndarray:
        return (np.arange(16) * (1 + index % 3) + index).astype(np.uint32) % 64

    def gather(self, indices: np.ndarray, dtype: DTypeLike | None = None) -> np.ndarray:
        return np.stack([self[int(index)] for index in indices]).astype(dtype)


class StoppingTelemetry(Telemetry):
    """Lets a stop signal come when a step is done, its evaluation included."""

    stop: StopSignals
    stop_after: int | None = None

    def begin(self, step: int, total_steps: int) -> None:
        super().begin(step, total_steps)
        self.reach(step)

    def row(self, row: Row, total_steps: int) -> None:
        super().row(row, total_steps)
        self.reach(row["step"])

    def reach(self, step: int) -> None:
        if self.stop_after is not None and step >= self.stop_after:
            self.stop.received = signal.SIGTERM


def training_config(**changes: object) -> TrainingConfig:
    base: dict[str, object] = {
        "steps": 12,
        "global_batch": 12,
        "micro_batch": 2,
        "precision": "fp32",
        "optimizer": {"lr": 0.01, "schedule": {"kind": "cosine", "warmup_steps": 3}},
        "checkpoint": {"interval": 4},
        "eval_interval": 6,
        "eval_samples": 24,
        "gc_interval": 0,
    }
    return TrainingConfig.model_validate(base | changes)


def run(
    folder: Path,
    options: dict,
    world: World,
    stop: StopSignals | None = None,
    seen: list | None = None,
    departure: Departure | None = None,
) -> Outcome:
    config = training_config(**options.get("training", {}))
    engine = TinyEngine(world, **options.get("engine", {}))
    attempt = open_attempt(folder, "tiny", world)
    identity = Identity(
        stage="lm",
        run_id=attempt.run_id,
        config={"seed": 0, "lm": {"training": config.model_dump(mode="json")}},
        config_hash="none",
        patch_size=1,
        vocab_size=64,
        tokenizer_fingerprint="tiny",
        shards_fingerprint=options.get("shards", "tiny"),
        topology={"world_size": world.world_size},
        attempt=attempt.number,
    )
    logging = LoggingConfig(
        wandb="disabled", interval=1, progress=False, pictures=options.get("pictures", False)
    )
    stop = stop or StopSignals()
    telemetry = StoppingTelemetry(folder, logging, world, "tiny", attempt.run_id, attempt.number)
    telemetry.stop, telemetry.stop_after = stop, options.get("stop_after")
    store = CheckpointStore(folder / "checkpoints", world, config.checkpoint, attempt.run_id, telemetry.say)
    samples = Sequences(options.get("sequences", SEQUENCES))
    plan = BatchPlan.of(config, engine.data_rank, engine.data_size)
    data = TrainingData(
        TrainingBatches(
            samples, SampleOrder(len(samples), 0), plan, config.end_of_data, config.loader_workers
        ),
        EvaluationBatches(Sequences(30), plan, config.eval_samples),
    )
    try:
        return fit(
            Training(engine, data, config, store, telemetry, world, identity, attempt),
            Start(options.get("accept", ()), options.get("resume_step")),
            stop,
            departure,
        )
    finally:
        if seen is not None:
            seen.extend(engine.seen)


def main() -> int:
    world = init_world(device="cpu")
    try:
        outcome = run(Path(sys.argv[1]), json.loads(sys.argv[2]), world, stop)
    except CalmScaleError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    world.close()
    return outcome.exit_code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an orderly end of torch costs seconds of CPU on a busy machine
