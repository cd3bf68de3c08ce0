"""The one training loop. It owns the step count, the schedule, logging, saves, signals, guards and the ledger."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from calm_scale.checkpoint.card import Card, Counters, Identity
from calm_scale.checkpoint.errors import DiskFullError, ResumeRefusedError
from calm_scale.checkpoint.store import CheckpointStore, Found
from calm_scale.config.errors import EXIT_OK, EXIT_REQUEUE
from calm_scale.config.training import TrainingConfig
from calm_scale.record.ledger import Cause
from calm_scale.record.metrics import storable
from calm_scale.runtime.departure import Departure
from calm_scale.runtime.finite import finite_floats
from calm_scale.runtime.signals import StopSignals
from calm_scale.runtime.telemetry import Telemetry
from calm_scale.runtime.watchdog import Watchdog
from calm_scale.runtime.world import World
from calm_scale.training.attempt import Attempt, Ledger, counters_of, resume
from calm_scale.training.batches import EvaluationBatches, TrainingBatches
from calm_scale.training.engine import Batch, Engine, StepResult
from calm_scale.training.nonfinite import NonFiniteError, NonFiniteGuard, is_finite_evaluation
from calm_scale.training.schedule import learning_rate


@dataclass(frozen=True)
class TrainingData:
    """What to train on, and what to evaluate on every ``eval_interval`` steps.

    ``padding_share``: padding among the training tokens, for the account of what was wasted.
    """

    train: TrainingBatches
    evaluation: EvaluationBatches | None = None
    padding_share: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended. ``exit_code`` is for the process: 0 finished, 75 put it back into the queue."""

    step: int
    cause: Cause
    exit_code: int
    resumed_at: int | None = None
    last_row: dict[str, Any] = field(default_factory=dict)


_SHOWN_SCORES = ("loss", "token_accuracy", "patch_accuracy", "std", "collapsed_dims")
"""Held-out figures that are printed; the record holds all."""


def fit(
    engine: Engine,
    data: TrainingData,
    config: TrainingConfig,
    store: CheckpointStore,
    telemetry: Telemetry,
    world: World,
    *,
    identity: Identity,
    attempt: Attempt,
    stop: StopSignals | None = None,
    accept: Sequence[str] = (),
    resume_step: int | None = None,
    fresh: bool = False,
    stop_after: int | None = None,
    on_resumed: Callable[[], object] = lambda: None,
    departure: Departure | None = None,
) -> Outcome:
    """Trains from wherever the run stands to ``config.steps``, or to the first stop signal. Every rank calls it.

    A run that is complete already is loaded and nothing else: no file is written.

    Args:
        store: where checkpoints go; its newest complete one is resumed.
        identity: goes into every card and is compared with the resumed one.
        attempt: from ``open_attempt``.
        stop: installed early by the stage; default: installed here.
        accept: changed fields that may change results.
        resume_step: resume this step instead of the newest, even a suspect one.
        fresh: refuse to resume.
        stop_after: stop after this step as if told to by a signal.
        on_resumed: called on the first rank once it is settled that there is something to train, as asked.
        departure: watches over the stage and is told of an error at once; default a watchdog of this call.

    Raises:
        ResumeRefusedError: nothing was begun, and nothing is recorded.
        NothingToResumeError, SaveError, NonFiniteError: after the ledger says why.
    """
    stop = stop or StopSignals()
    stop.install()
    ledger = Ledger(
        attempt, world, identity.stage, config.precision, telemetry.warn, padding_share=data.padding_share
    )
    if attempt.damage:
        telemetry.warn(attempt.damage)
    place = f"{identity.stage} rank {world.rank}" + (f" ({engine.place})" if engine.place else "")
    watchdog = departure.watchdog if departure is not None else Watchdog(config.stall_seconds, place)
    watchdog.introduce(place, lambda operation: ledger.write("stop", "stalled"))
    loop = _Loop(engine, data, config, store, telemetry, world, identity, ledger, watchdog, stop)
    loop.stop_after = stop_after
    try:
        return loop.run(accept, resume_step, fresh, on_resumed)
    except ResumeRefusedError:
        raise
    except BaseException as error:
        if departure is not None:
            departure.failed(error, loop.counters.steps)
        ledger.write("stop", _cause(error))
        raise
    finally:
        if departure is None:
            watchdog.close()
        telemetry.close()


def _cause(error: BaseException) -> Cause:
    if isinstance(error, NonFiniteError):
        return "nonfinite"
    return "disk_full" if isinstance(error, DiskFullError) else "error"


class _Loop:
    def __init__(
        self,
        engine: Engine,
        data: TrainingData,
        config: TrainingConfig,
        store: CheckpointStore,
        telemetry: Telemetry,
        world: World,
        identity: Identity,
        ledger: Ledger,
        watchdog: Watchdog,
        stop: StopSignals,
    ) -> None:
        self.engine, self.data, self.config, self.store = engine, data, config, store
        self.telemetry, self.world, self.identity = telemetry, world, identity
        self.ledger, self.watchdog, self.stop = ledger, watchdog, stop
        self.counters = Counters()
        self.guard = NonFiniteGuard(config)
        self.pending_row: dict[str, Any] | None = None
        self.row: dict[str, Any] = {}
        self.resumed_at: int | None = None
        self.stop_after: int | None = None

    def run(
        self, accept: Sequence[str], step: int | None, fresh: bool, on_resumed: Callable[[], object]
    ) -> Outcome:
        found = self._resume(accept, step, fresh)
        if found is not None and self._is_complete(found):
            self.telemetry.say(
                f"was complete already: step {found.step}, in {self.store.root}; nothing to do"
            )
            return Outcome(found.step, "finished", EXIT_OK, found.step, dict(found.card.metrics))
        self.ledger.write("start")
        self.telemetry.begin(self.counters.steps, self.config.steps)
        if self.world.is_first:
            on_resumed()
        try:
            with closing(self.data.train.iterate(self.counters.steps + 1, self.counters.samples)) as batches:
                return self._train(batches)
        except NonFiniteError:
            self.store.close()  # what is being written in the background; every rank is here
            self._mark_suspects()
            raise

    def _resume(self, accept: Sequence[str], step: int | None, fresh: bool) -> Found | None:
        with self.watchdog.doing("resume"), self.ledger.timing("load"):
            found = resume(self.engine, self.store, self.identity, self.telemetry.say, accept, step, fresh)
        self.counters = self.ledger.first = self.ledger.counters = counters_of(found)
        if found is not None:
            self.guard.resume(found.card)
            self.resumed_at = found.step
            self.pending_row = found.card.pending_row
        return found

    def _is_complete(self, found: Found) -> bool:
        """Every step is done, and what was left is neither an evaluation nor a doubt."""
        return found.step >= self.config.steps and self.pending_row is None and not found.card.suspect

    def _train(self, batches: Iterator[Batch]) -> Outcome:
        if self.pending_row is not None:
            self._evaluate(self.pending_row)
        while self.counters.steps < self.config.steps:
            if self._asked_to_stop():
                return self._end("signal", EXIT_REQUEUE)
            with self.watchdog.doing("reading data"), self.ledger.timing("stall"):
                batch = next(batches, None)
            if batch is None:
                return self._out_of_data()
            self._step(batch)
            if self.config.checkpoint.is_due(self.counters.steps):
                self._save(background=self.config.checkpoint.async_save)
            self.ledger.progress()
        if self.pending_row is not None:
            return self._end("signal", EXIT_REQUEUE)
        return self._end("finished", EXIT_OK)

    def _step(self, batch: Batch) -> None:
        step = self.counters.steps + 1
        lr = learning_rate(self.config.optimizer, step, self.config.steps)
        start, cpu = time.monotonic(), time.process_time()
        with self.watchdog.doing(f"training step {step}"), self.ledger.timing("train"):
            result = self.engine.train_step(batch, lr)
        clocks = {"seconds": time.monotonic() - start, "cpu_seconds": time.process_time() - cpu}
        row = self.row = self._numbers(step, lr, result, clocks)
        try:
            warning = self.guard.judge(step, result)
        except NonFiniteError:
            self.telemetry.row(row, self.config.steps)
            raise
        finally:
            self._count(step)
        if warning is not None:
            self.telemetry.warn(warning)
        else:
            self._rotate_if_proven()
        self._say_if_an_epoch_ends()
        if step % self.config.eval_interval == 0 or step == self.config.steps:
            self._evaluate(row)
        else:
            self.telemetry.row(row, self.config.steps)

    def _numbers(self, step: int, lr: float, result: StepResult, clocks: dict[str, float]) -> dict[str, Any]:
        tokens = self.data.train.tokens_per_batch
        return {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "skipped": result.skipped,
            "samples": self.counters.samples + self.data.train.plan.global_batch,
            "tokens": self.counters.tokens + tokens,
            **result.metrics,
            **clocks,
            "tokens_per_s": tokens / max(clocks["seconds"], 1e-9),
            "time": time.time(),
        }

    def _count(self, step: int) -> None:
        self.counters = Counters(
            steps=step,
            samples=self.counters.samples + self.data.train.plan.global_batch,
            tokens=self.counters.tokens + self.data.train.tokens_per_batch,
            skipped_steps=self.guard.skipped_steps,
            consecutive_skips=self.guard.consecutive,
        )
        self.ledger.counters = self.counters

    def _say_if_an_epoch_ends(self) -> None:
        size, done = len(self.data.train.samples), self.counters.samples
        if done // size > (done - self.data.train.plan.global_batch) // size:
            self.telemetry.say(
                f"end of epoch {done // size} ({size} sequences) in step {self.counters.steps}"
            )

    def _evaluate(self, row: dict[str, Any]) -> None:
        """Adds ``eval/…`` to the step's row; a stop signal ends it early, and the resumed run does it again."""
        evaluation = self.data.evaluation
        if evaluation is not None:
            with self.watchdog.doing(f"evaluation at step {row['step']}"), self.ledger.timing("eval"):
                source = _Interruptible(evaluation.iterate(row["step"]), self)
                scores = self.engine.evaluate(source)
            self.pending_row = row if source.interrupted else None
            if not source.interrupted:
                if warning := self.guard.judge_evaluation(row["step"], scores):
                    self.telemetry.warn(warning)
                row = row | {f"eval/{name}": value for name, value in scores.items()}
                self.ledger.eval_tokens += evaluation.num_tokens
                shown = [f"{name} {scores[name]:.4g}" for name in _SHOWN_SCORES if name in scores]
                self.telemetry.say(f"step {row['step']} held out: {', '.join(shown)}")
        self.row = row
        self.telemetry.row(row, self.config.steps)
        self.ledger.write("eval")

    def _asked_to_stop(self) -> bool:
        """One word between all ranks per step: has any been told to stop, and is every background save ready?"""
        with self.watchdog.doing(f"agreeing after step {self.counters.steps}"):
            signal, waiting = self.world.maximum([self.stop.received, int(self.store.waiting)])
        if self.store.saving is not None and not waiting:
            with self.watchdog.doing("committing a checkpoint"), self.ledger.timing("save"):
                self._tolerating_a_full_disk(self.store.advance)
        self.stop.received = self.stop.received or signal
        return bool(signal) or (self.stop_after is not None and self.counters.steps >= self.stop_after)

    def _save(self, background: bool = False) -> None:
        step = self.counters.steps
        if self.store.last_saved == step:
            return
        with self.watchdog.doing(f"saving step {step}"), self.ledger.timing("save"):
            self._refuse_nonfinite_state(step)
            self.telemetry.sync()
            if self.store.saving is not None:
                self._tolerating_a_full_disk(self.store.finish)
            self._rotate_if_proven()
            start = self.engine.save_async if background else self.engine.save
            self._tolerating_a_full_disk(lambda: self.store.begin(step, start, self._card(), background))
            if not background and self.store.saving is not None:
                self._tolerating_a_full_disk(self.store.finish)
        self.ledger.write("save")

    def _rotate_if_proven(self) -> None:
        """Older checkpoints go once a finite step has followed the newest: until then its model may be lost."""
        proof, newest = self.guard.last_finite, self.store.last_saved
        if self.store.rotation_due and proof is not None and newest is not None and proof > newest:
            with self.watchdog.doing("removing old checkpoints"), self.ledger.timing("save"):
                self.store.rotate()

    def _mark_suspects(self) -> None:
        """Marks what was saved since the last finite step, and the checkpoint of that step itself where its model
        is lost: skipped updates change nothing, so the model here is the one saved there."""
        last = self.guard.last_finite
        since = last if last is not None else self.resumed_at or 0
        evaluation = self.data.evaluation
        lost = last is None and self.resumed_at is not None
        if evaluation is not None:
            with self.watchdog.doing("evaluating the last checkpoint's model"):
                first_batch = islice(evaluation.iterate(self.counters.steps), 1)
                lost = not is_finite_evaluation(self.engine.evaluate(first_batch))
        self.store.mark_suspect(since if lost else since + 1, f"no step after {since} was finite")

    def _tolerating_a_full_disk(self, work: Any) -> None:
        try:
            work()
        except DiskFullError as error:
            if self.config.checkpoint.on_disk_full == "stop":
                raise
            self.telemetry.warn(f"{error}. Training goes on (checkpoint.on_disk_full is `continue`)")

    def _refuse_nonfinite_state(self, step: int) -> None:
        if not self.engine.is_finite():
            raise NonFiniteError(
                f"step {step}: a parameter is not finite; not saved. Resume from the newest checkpoint"
            )

    def _card(self) -> Card:
        optimizer = self.config.optimizer
        lr = learning_rate(optimizer, self.counters.steps, self.config.steps) if self.counters.steps else 0.0
        return Card.of(
            self.identity,
            created=time.time(),
            counters=self.counters,
            schedule=optimizer.schedule.model_dump() | {"lr": lr, "total_steps": self.config.steps},
            rng={
                "scheme": "keyed by seed, step, sample and position; no state",
                "seed": self.identity.config.get("seed"),
            },
            metrics=finite_floats(self.row),
            pending_row=None if self.pending_row is None else storable(self.pending_row),
            suspect=self.guard.doubt(at_end=self.counters.steps >= self.config.steps),
        )

    def _out_of_data(self) -> Outcome:
        left = len(self.data.train.samples) - self.counters.samples
        self.telemetry.say(
            f"end of data after step {self.counters.steps}: {left} of {len(self.data.train.samples)} sequences are "
            "left, less than a global batch; training.end_of_data is `stop`"
        )
        return self._end("finished", EXIT_OK)

    def _end(self, cause: Cause, exit_code: int) -> Outcome:
        """The state of the step reached is on disk before this returns, exactly once."""
        if cause == "signal":
            self.telemetry.say(f"asked to stop: saving step {self.counters.steps}")
        with self.watchdog.doing("finishing the last save"), self.ledger.timing("save"):
            if self.store.saving is not None:
                self._tolerating_a_full_disk(self.store.finish)
        self._save()
        doubt = self.guard.doubt(at_end=cause == "finished")
        if cause == "finished" and doubt:
            raise NonFiniteError(
                f"the run ended at step {self.counters.steps}, but {doubt}: this is not a trained model. Change what "
                "made it diverge (the learning rate, the data) and start it again: it resumes from the newest "
                "checkpoint that is not suspect"
            )
        with self.watchdog.doing("closing the store"):
            if cause == "finished" and self.data.evaluation is not None:
                self.store.rotate()  # the held-out loss was finite
            self.store.close()
        self.ledger.write("stop", cause)
        self.telemetry.say(self._last_words(cause, doubt))
        return Outcome(self.counters.steps, cause, exit_code, self.resumed_at, self.row)

    def _last_words(self, cause: Cause, doubt: str) -> str:
        step, kept = self.counters.steps, self.store.last_saved
        if cause != "signal":
            return f"complete: step {step}, in {self.store.root}"
        if doubt:
            return (
                f"stopped at step {step}, saved as suspect ({doubt}); run the same command again to go on from the "
                "newest checkpoint before"
            )
        return f"stopped at step {step}; run the same command again to go on from step {kept or 0}"


class _Interruptible(Iterator[Batch]):
    """Evaluation batches that end early when any rank was told to stop. The first one is always given."""

    def __init__(self, batches: Iterator[Batch], loop: _Loop) -> None:
        self._batches, self._loop = batches, loop
        self._given = 0
        self.interrupted = False

    def __next__(self) -> Batch:
        batch = next(self._batches)
        if self._given:
            self._loop.stop.received = self._loop.world.maximum([self._loop.stop.received])[0]
            if self._loop.stop.received:
                self.interrupted = True
                raise StopIteration
        self._given += 1
        return batch
