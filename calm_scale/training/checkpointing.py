"""The checkpoints of a training: resuming, saving, rotating, and marking those that are suspect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from calm_scale.checkpoint.card import Card, Identity
from calm_scale.checkpoint.diff import resume_diff
from calm_scale.checkpoint.errors import CheckpointError, DiskFullError
from calm_scale.checkpoint.store import CheckpointStore, Found
from calm_scale.training.attempt import Ledger, Start, Training
from calm_scale.training.engine import Engine
from calm_scale.training.nonfinite import NonFiniteError, NonFiniteGuard, is_finite_evaluation


class Checkpointing:
    """What the loop asks of engine and store. Every rank makes every call, in the same order.

    Attributes:
        resumed_at: the step that was resumed; None in a new run.
    """

    def __init__(self, training: Training, ledger: Ledger, guard: NonFiniteGuard) -> None:
        self.resumed_at: int | None = None
        self._training, self._ledger, self._guard = training, ledger, guard
        self._engine, self._store = training.engine, training.store

    def resume(self, start: Start) -> Found | None:
        """Loads the checkpoint to continue from; see ``resume``. None: the run starts at step 0."""
        training = self._training
        with self._ledger.phase("resume", "load"):
            found = resume(
                self._engine,
                self._store,
                training.identity,
                training.telemetry.say,
                start.accept,
                start.resume_step,
            )
        if found is not None:
            self._guard.resume(found.card)
            self.resumed_at = found.step
        return found

    def save(self, card: Card, background: bool = False) -> None:
        """Saves the step of the card, unless it is saved already; in the background it is committed by ``advance``.

        Raises:
            NonFiniteError: a parameter is not finite.
            SaveError: on every rank; on a full disk only where the configuration says `stop`.
        """
        with self._ledger.phase("finishing the last save", "save"):
            self._finish()
        if self._store.last_saved == card.step:
            return
        with self._ledger.phase(f"checking step {card.step}", "save"):
            if not self._engine.is_finite():
                raise NonFiniteError(
                    f"step {card.step}: a parameter is not finite; not saved. Resume from the newest checkpoint"
                )
        self.rotate_if_proven()
        with self._ledger.phase(f"saving step {card.step}", "save"):
            self._training.telemetry.sync()
            start = self._engine.save_async if background else self._engine.save
            self._tolerate_a_full_disk(lambda: self._store.begin(card.step, start, card, background))
            if not background:
                self._finish()
        self._ledger.write("save")

    def advance(self) -> None:
        """One phase further with a save in the background; only when every rank's work on it is ready."""
        if self._store.saving is not None:
            with self._ledger.phase("committing a checkpoint", "save"):
                self._tolerate_a_full_disk(self._store.advance)

    def rotate_if_proven(self) -> None:
        """Older checkpoints go once a finite step has followed the newest: until then its model may be lost."""
        proof, newest = self._guard.last_finite, self._store.last_saved
        if self._store.rotation_due and proof is not None and newest is not None and proof > newest:
            with self._ledger.phase("removing old checkpoints", "save"):
                self._store.rotate()

    def mark_suspects(self, step: int) -> None:
        """After a streak that ended at ``step``: marks what was saved since the last finite step.

        The checkpoint of that step itself too where its model is lost: skipped updates change nothing, so the model
        here is the one saved there.
        """
        self._store.close()  # what is being written in the background; every rank is here
        last, evaluation = self._guard.last_finite, self._training.data.evaluation
        since = last if last is not None else self.resumed_at or 0
        lost = last is None and self.resumed_at is not None
        if evaluation is not None:
            with self._ledger.phase("evaluating the last checkpoint's model"):
                lost = not is_finite_evaluation(self._engine.evaluate(islice(evaluation.iterate(step), 1)))
        self._store.mark_suspect(since if lost else since + 1, f"no step after {since} was finite")

    def close(self, *, is_proven: bool) -> None:
        """Ends the removal of old checkpoints; they are removed where the newest is proven by its held-out loss."""
        with self._ledger.phase("closing the store"):
            if is_proven:
                self._store.rotate()
            self._store.close()

    def _finish(self) -> None:
        if self._store.saving is not None:
            self._tolerate_a_full_disk(self._store.finish)

    def _tolerate_a_full_disk(self, work: Callable[[], object]) -> None:
        try:
            work()
        except DiskFullError as error:
            if self._training.config.checkpoint.on_disk_full == "stop":
                raise
            self._training.telemetry.warn(
                f"{error}. Training goes on (checkpoint.on_disk_full is `continue`)"
            )


def resume(
    engine: Engine,
    store: CheckpointStore,
    identity: Identity,
    say: Callable[[str], None],
    accept: Sequence[str] = (),
    step: int | None = None,
) -> Found | None:
    """Loads the newest complete checkpoint (or ``step``) into the engine. None: nothing there, a new run.

    Args:
        accept: fields whose change may change results.

    Raises:
        NothingToResumeError: there are checkpoints, but none that can be used.
        ResumeRefusedError: it is another run's, or the configuration changed in a way that the caller did not accept.
    """
    found = store.newest(step)
    if found is None:
        return None
    diff = store.world.on_first(  # one verdict: another node may not see the same tokenizer file
        lambda: resume_diff(found.card, identity.config, identity.stage, identity.fingerprints)
    )
    for change in diff.of("safe"):
        say(f"resuming with a changed field: {change.text()}")
    diff.check(accept)
    for change in diff.of("results"):
        say(f"resuming with a changed field: {change.text(accept)}")
    store.world.everywhere(lambda: _load(engine, found))
    same = found.card.topology == identity.topology
    say(f"resumed at step {found.step} from {found.path.name}" + ("" if same else _layouts(found, identity)))
    return found


def _load(engine: Engine, found: Found) -> None:
    try:
        engine.load(found.shards)
    except Exception as error:
        raise CheckpointError(
            f"{found.path} is whole, but the engine cannot load it: {type(error).__name__}: {error}"
        ) from error


def _layouts(found: Found, identity: Identity) -> str:
    def text(topology: dict[str, object]) -> str:
        return ", ".join(f"{key} {value}" for key, value in topology.items())

    return f", written by ({text(found.card.topology)}), now ({text(identity.topology)})"
