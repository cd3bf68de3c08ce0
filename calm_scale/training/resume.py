"""From a run's folder to the state it goes on from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from calm_scale.checkpoint.card import Counters, Identity
from calm_scale.checkpoint.diff import resume_diff
from calm_scale.checkpoint.errors import CheckpointError, NothingToResumeError
from calm_scale.checkpoint.store import CheckpointStore, Found
from calm_scale.training.engine import Engine


def resume(
    engine: Engine,
    store: CheckpointStore,
    identity: Identity,
    say: Callable[[str], None],
    accept: Sequence[str] = (),
    step: int | None = None,
    fresh: bool = False,
) -> Found | None:
    """Loads the newest complete checkpoint (or ``step``) into the engine. None: nothing there, a new run.

    Args:
        accept: fields whose change may change results.
        fresh: insist on starting from step 0.

    Raises:
        NothingToResumeError: checkpoints that cannot be used, or ``fresh`` and there are some.
        ResumeRefusedError: it is another run's, or the configuration changed in a way that needs a word.
    """
    found = store.newest(step)
    if found is None:
        return None
    if fresh:
        raise NothingToResumeError(
            f"asked for a fresh start, but {store.root} holds {found.path.name}. Move the folder away, or resume"
        )
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


def counters_of(found: Found | None) -> Counters:
    """Where to go on counting."""
    return found.card.counters if found is not None else Counters()


def _layouts(found: Found, identity: Identity) -> str:
    def text(topology: dict[str, object]) -> str:
        return ", ".join(f"{key} {value}" for key, value in topology.items())

    return f", written by ({text(found.card.topology)}), now ({text(identity.topology)})"
