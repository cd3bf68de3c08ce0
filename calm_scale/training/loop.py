"""The one training loop: step count, schedule, logging, saves, signals, guards and the ledger.

``fit`` resumes and reports how the attempt ended; ``_Loop.train`` goes from step to step; ``_Loop._step`` is one step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

from calm_scale.checkpoint.card import Card, Counters
from calm_scale.checkpoint.errors import DiskFullError, ResumeRefusedError
from calm_scale.checkpoint.store import Found
from calm_scale.config.errors import EXIT_OK, EXIT_REQUEUE
from calm_scale.record.ledger import Cause
from calm_scale.record.metrics import storable
from calm_scale.runtime.departure import Departure, StopSignals
from calm_scale.runtime.finite import finite_floats
from calm_scale.runtime.watchdog import Watchdog
from calm_scale.training.attempt import Ledger, Outcome, Start, Training
from calm_scale.training.batches import UntilStopped
from calm_scale.training.checkpointing import Checkpointing
from calm_scale.training.engine import Batch, StepResult
from calm_scale.training.garbage import GarbageCollection
from calm_scale.training.nonfinite import NonFiniteError, NonFiniteGuard
from calm_scale.training.profiling import StepProfiler
from calm_scale.training.rank_clock import RankClock
from calm_scale.training.schedule import learning_rate
from calm_scale.training.stall import StepLimit, dump_collectives

_SHOWN_SCORES = ("loss", "token_accuracy", "patch_accuracy", "std", "collapsed_dims")
"""Held-out figures that are printed; the record holds all."""


def fit(
    training: Training,
    start: Start,
    stop: StopSignals,
    departure: Departure | None = None,
    on_begin: Callable[[], object] = lambda: None,
) -> Outcome:
    """Trains from the newest checkpoint (or step 0) to ``config.steps`` or the first stop signal. Every rank calls it.

    A run that is complete already is loaded and nothing else: no file is written.

    Args:
        stop: installed early by the stage, and here again: libraries put their own handlers there.
        departure: has the watchdog of the stage and reports an error at once; default: a watchdog for this call.
        on_begin: called on the first rank before the first step, unless the run is complete or refused.

    Raises:
        ResumeRefusedError: nothing was started and nothing is recorded.
        NothingToResumeError, SaveError, NonFiniteError: the ledger has the cause.
    """
    stop.install()
    at = training.engine.place
    place = f"{training.identity.stage} rank {training.world.rank}" + (f" ({at})" if at else "")
    watchdog = departure.watchdog if departure else Watchdog(training.config.stall_seconds, place)
    loop = _Loop(training, stop, watchdog)
    watchdog.introduce(place, loop.record_stall)
    try:
        found = loop.resume(start)
        if found is not None and loop.is_complete(found):
            return loop.leave_as_it_is(found)
        return loop.train(on_begin)
    except ResumeRefusedError:
        raise
    except BaseException as error:
        if departure:
            departure.failed(error, loop.counters.steps)
        loop.ledger.write("stop", _cause(error))
        raise
    finally:
        if departure is None:
            watchdog.close()
        loop.rank_clock.close()
        training.telemetry.close()


def _cause(error: BaseException) -> Cause:
    if isinstance(error, NonFiniteError):
        return "nonfinite"
    return "disk_full" if isinstance(error, DiskFullError) else "error"


class _Loop:
    """The state of one attempt between its steps.

    Attributes:
        counters: steps, samples and tokens so far.
        row: the numbers of the latest step.
        pending_row: the row of a step whose evaluation was ended by a stop signal; it is evaluated first.
    """

    def __init__(self, training: Training, stop: StopSignals, watchdog: Watchdog) -> None:
        self.engine, self.data, self.config = training.engine, training.data, training.config
        self.store, self.telemetry, self.world = training.store, training.telemetry, training.world
        self.identity, self.stop = training.identity, stop
        self.ledger = Ledger(training, watchdog)
        self.attempt, self.step_limit = training.attempt, StepLimit()
        self.guard = NonFiniteGuard(self.config)
        self.checkpoints = Checkpointing(training, self.ledger, self.guard)
        self.training, self.rank_clock = training, RankClock(training)
        self.counters = Counters()
        self.row: dict[str, Any] = {}
        self.pending_row: dict[str, Any] | None = None

    def resume(self, start: Start) -> Found | None:
        """Loads the checkpoint to continue from. None: the run starts at step 0."""
        found = self.checkpoints.resume(start)
        if found is not None:
            self.counters = found.card.counters
            self.pending_row = found.card.pending_row
        self.ledger.first = self.ledger.counters = self.counters
        return found

    def record_stall(self, operation: str) -> None:
        """The watchdog's last words: the ledger's line, and which collectives are open on this rank."""
        self.ledger.write("stop", "stalled")
        dump_collectives(self.attempt.folder, self.attempt.number, self.world.rank)

    def is_complete(self, found: Found) -> bool:
        """Every step is done, and what was left is neither an evaluation nor a doubt."""
        return found.step >= self.config.steps and self.pending_row is None and not found.card.suspect

    def leave_as_it_is(self, found: Found) -> Outcome:
        """Ends an attempt of a run that is complete."""
        self.telemetry.say(f"already complete: step {found.step}, in {self.store.root}; nothing to do")
        return Outcome(found.step, "finished", EXIT_OK, found.step, dict(found.card.metrics))

    def train(self, on_begin: Callable[[], object]) -> Outcome:
        """Step after step, to the last one, to the end of the data or to a stop signal."""
        self.ledger.write("start")
        self.telemetry.begin(self.counters.steps, self.config.steps)
        if self.world.is_first:
            on_begin()
        try:
            with (
                GarbageCollection(self.config.gc_interval) as garbage,
                StepProfiler(self.training, self.counters.steps) as profiler,
                closing(self.data.train.iterate(self.counters.steps + 1, self.counters.samples)) as batches,
            ):
                if self.pending_row is not None:
                    self._evaluate(self.pending_row)
                while self.counters.steps < self.config.steps:
                    if self._asked_to_stop():
                        return self._end("signal", EXIT_REQUEUE)
                    profiler.begin(self.counters.steps + 1)
                    start = time.monotonic()
                    with self.ledger.phase("reading data", "stall"):
                        batch = next(batches, None)
                    if batch is None:
                        return self._out_of_data()
                    self._step(batch, time.monotonic() - start)
                    profiler.end(self.counters.steps)
                    if self.config.checkpoint.is_due(self.counters.steps):
                        self.checkpoints.save(self._card(), background=self._saves_in_background)
                    garbage.after(self.counters.steps)
                    self.ledger.progress()
            if self.pending_row is not None:
                return self._end("signal", EXIT_REQUEUE)
            return self._end("finished", EXIT_OK)
        except NonFiniteError:
            self.checkpoints.mark_suspects(self.counters.steps)
            raise

    def _step(self, batch: Batch, reading_seconds: float) -> None:
        step = self.counters.steps + 1
        lr = learning_rate(self.config.optimizer, step, self.config.steps)
        start, cpu = time.monotonic(), time.process_time()
        phase = self.ledger.phase(f"training step {step}", "train", self.step_limit.seconds)
        with phase, self.rank_clock.measuring(step):
            result = self.engine.train_step(batch, lr)
        self.step_limit.add(time.monotonic() - start)
        clocks = {"seconds": time.monotonic() - start, "cpu_seconds": time.process_time() - cpu}
        if self.rank_clock.is_due(step):
            with self.ledger.phase(f"gathering the ranks' times of step {step}"):
                self.rank_clock.gather(step, reading_seconds + clocks["seconds"])
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
            self.checkpoints.rotate_if_proven()
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
            with self.ledger.phase(f"evaluation at step {row['step']}", "eval"):
                batches = UntilStopped(evaluation.iterate(row["step"]), self._told_to_stop)
                scores = self.engine.evaluate(batches)
            self.pending_row = row if batches.stopped else None
            if not batches.stopped:
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
        """One reduction over all ranks per step: has any received a stop signal, and is every background save ready?"""
        with self.ledger.phase(f"agreeing after step {self.counters.steps}"):
            signal, waiting = self.world.poll([self.stop.received, int(self.store.waiting)])
        if not waiting:
            self.checkpoints.advance()
        self.stop.received = self.stop.received or signal
        return bool(signal)

    def _told_to_stop(self) -> bool:
        """Whether any rank has received a stop signal."""
        self.stop.received = self.world.poll([self.stop.received])[0]
        return bool(self.stop.received)

    @property
    def _saves_in_background(self) -> bool:
        asked = self.config.checkpoint.async_save
        return self.world.device.type == "cuda" if asked is None else asked

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
        self.checkpoints.save(self._card())
        doubt = self.guard.doubt(at_end=cause == "finished")
        if cause == "finished" and doubt:
            raise NonFiniteError(
                f"the run ended at step {self.counters.steps}, but {doubt}: this is not a trained model. Change what "
                "made it diverge (the learning rate, the data) and start it again: it resumes from the newest "
                "checkpoint that is not suspect"
            )
        self.checkpoints.close(is_proven=cause == "finished" and self.data.evaluation is not None)
        self.ledger.write("stop", cause)
        self.telemetry.say(self._describe_end(cause, doubt))
        return Outcome(self.counters.steps, cause, exit_code, self.checkpoints.resumed_at, self.row)

    def _describe_end(self, cause: Cause, doubt: str) -> str:
        step, kept = self.counters.steps, self.store.last_saved
        if cause != "signal":
            return f"complete: step {step}, in {self.store.root}"
        if doubt:
            return (
                f"stopped at step {step}, saved as suspect ({doubt}); run the same command again to resume from "
                "the newest checkpoint that is not suspect"
            )
        return f"stopped at step {step}; run the same command again to resume from step {kept or 0}"
