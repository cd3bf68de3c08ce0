"""An error on one rank, whoever expected it, ends all ranks with one message and nobody waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from calm_scale.checkpoint import saving
from calm_scale.checkpoint import store as store_room
from calm_scale.checkpoint.diff import ResumeDiff
from calm_scale.checkpoint.store import CheckpointStore
from calm_scale.config.errors import CalmScaleError, ConfigError
from calm_scale.config.training import CheckpointConfig
from calm_scale.evaluation import sequences
from calm_scale.runtime.world import World
from calm_scale.training import attempt, checkpointing
from data_prep.prep.workers import StoppedError
from launchers.ranks import HEARTBEAT_SECONDS, see_alike

OnTwoRanks = Callable[[Callable[[World], object]], list[BaseException | None]]
Failing = Callable[..., Any]


class UnreadableError(ConfigError):
    """Pickles, and cannot be read back."""

    def __init__(self, key: str, line: int) -> None:
        super().__init__(f"{key}: line {line}")


ERRORS = [
    RuntimeError("device lost"),
    KeyError("lm"),
    OSError(5, "Input/output error"),
    UnreadableError("a", 3),
]


def fail_on(failing: int, error: Exception) -> Callable[[World], Failing]:
    def of(world: World) -> Failing:
        def work(*_: Any, **__: Any) -> Any:
            if world.rank == failing:
                raise error
            return []

        return work

    return of


def assert_shared(errors: list[BaseException | None], text: str) -> None:
    first, second = errors
    assert isinstance(first, CalmScaleError) and isinstance(second, CalmScaleError), errors
    assert str(first) == str(second)
    assert text in str(first)
    assert first.exit_code == second.exit_code


@pytest.mark.parametrize("patient", [False, True])
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_anywhere_is_the_error_of_every_rank(
    on_two_ranks: OnTwoRanks, error: Exception, failing: int, patient: bool
) -> None:
    broken = fail_on(failing, error)
    patience = (lambda: None) if patient else None
    errors = on_two_ranks(lambda world: world.everywhere(broken(world), patience=patience))
    assert_shared(errors, str(error))
    assert {error.shared_from for error in errors if isinstance(error, CalmScaleError)} == {failing}
    if isinstance(error, ConfigError):
        assert isinstance(errors[0], ConfigError) and isinstance(errors[1], ConfigError)
    else:
        assert f"rank {failing} on " in str(errors[0])
    if failing == 0:
        assert_shared(
            on_two_ranks(lambda world: world.on_first(broken(world), patience=patience)), str(error)
        )


def test_the_cause_is_shown_rather_than_an_error_that_says_that_another_rank_failed(
    on_two_ranks: OnTwoRanks,
) -> None:
    def fail(world: World) -> None:
        if world.rank == 1:
            raise ConfigError("disk full")
        raise StoppedError("stopped because another process of this prep failed")

    assert_shared(on_two_ranks(lambda world: world.everywhere(lambda: fail(world))), "disk full")


def test_results_reach_every_rank_and_one_that_cannot_be_sent_is_an_error(on_two_ranks: OnTwoRanks) -> None:
    found: dict[int, Any] = {}

    def work(world: World) -> None:
        found[world.rank] = (
            world.everywhere(lambda: world.rank),
            world.on_first(lambda: f"from {world.rank}"),
        )

    assert on_two_ranks(work) == [None, None]
    assert found == {0: ([0, 1], "from 0"), 1: ([0, 1], "from 0")}
    assert_shared(on_two_ranks(lambda world: world.everywhere(threading.Lock)), "rank 0 on ")


def test_a_rank_that_works_long_keeps_the_others_in_touch_and_is_not_waited_for_after_a_failure(
    on_two_ranks: OnTwoRanks,
) -> None:
    beats: list[int] = []

    def slow(world: World) -> None:
        world.on_first(lambda: time.sleep(3 * HEARTBEAT_SECONDS), patience=lambda: beats.append(world.rank))

    assert on_two_ranks(slow) == [None, None]
    assert beats.count(1) >= 3
    started = time.monotonic()
    released = threading.Event()

    def one_fails(world: World) -> None:
        def work() -> None:
            if world.rank == 1:
                raise KeyError("shard")
            released.wait(120)

        world.everywhere(work, patience=lambda: None)

    assert_shared(on_two_ranks(one_fails), "rank 1 on ")
    assert time.monotonic() - started < 60
    released.set()


def patched(owner: Any, name: str, broken: Callable[[World], Failing]) -> Callable[[World], None]:
    """Replaces a function of a module by one that fails on the thread of the failing rank."""

    def install(world: World) -> None:
        ranks[threading.get_ident()] = world

    ranks: dict[int, World] = {}

    def fail(*_: Any, **__: Any) -> Any:
        return broken(ranks[threading.get_ident()])()

    setattr(owner, name, fail)
    return install


def claims(world: World, folder: Path) -> None:
    with attempt.claimed(folder, world):
        pass


def saves(world: World, folder: Path) -> None:
    (folder / "step_00000001.tmp" / "shards").mkdir(parents=True, exist_ok=True)
    card: Any = SimpleNamespace(step=1, write=lambda place: (place / "card.json").write_text("{}"))

    def write(shards: Path) -> list[str]:
        (shards / str(world.rank)).touch()
        return [str(world.rank)]

    save = saving.Save(folder, world, card, write)
    while save.phase != "committed":
        save.advance()


PLACES: dict[str, tuple[Any, str, Callable[[World, Path], object], tuple[int, ...]]] = {
    "claiming the folder": (attempt, "_take", claims, (0,)),
    "the attempt's number": (
        attempt.ledger,
        "history",
        lambda world, folder: attempt.open_attempt(folder, "run", world),
        (0,),
    ),
    "listing checkpoints": (
        store_room,
        "inventory",
        lambda world, folder: CheckpointStore(folder, world, CheckpointConfig()).newest(),
        (0,),
    ),
    "the step folders": (
        store_room,
        "step_folders",
        lambda world, folder: CheckpointStore(folder, world, CheckpointConfig()).newest(),
        (0, 1),
    ),
    "reading what was saved": (saving, "checksum", saves, (0, 1)),
    "the commit of a save": (saving, "judge", saves, (0,)),
}


@pytest.mark.parametrize(
    ("place", "failing"), [(place, rank) for place, entry in PLACES.items() for rank in entry[3]]
)
@pytest.mark.parametrize("error", ERRORS[:2], ids=lambda error: type(error).__name__)
def test_every_place_shares_what_it_did_not_expect(
    on_two_ranks: OnTwoRanks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    failing: int,
    error: Exception,
) -> None:
    owner, name, work, _ = PLACES[place]
    monkeypatch.setattr(owner, name, getattr(owner, name))  # restored at the end
    install = patched(owner, name, fail_on(failing, error))
    started = time.monotonic()

    def rank(world: World) -> None:
        install(world)
        work(world, tmp_path)

    assert_shared(on_two_ranks(rank), str(error))
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("failing", [0, 1])
def test_a_state_that_one_rank_cannot_load_is_named_on_both(
    on_two_ranks: OnTwoRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    monkeypatch.setattr(checkpointing, "resume_diff", lambda *_: ResumeDiff((), 0))
    broken = fail_on(failing, KeyError("optimizer"))

    def rank(world: World) -> None:
        found: Any = SimpleNamespace(
            path=tmp_path, shards=tmp_path, step=1, card=SimpleNamespace(topology={})
        )
        store: Any = SimpleNamespace(world=world, newest=lambda step: found, root=tmp_path)
        engine: Any = SimpleNamespace(load=broken(world))
        identity: Any = SimpleNamespace(config={}, stage="lm", fingerprints={}, topology={})
        checkpointing.resume(engine, store, identity, lambda line: None)

    assert_shared(on_two_ranks(rank), "cannot load it: KeyError: 'optimizer'")


@pytest.mark.parametrize("failing", [0, 1])
def test_scoring_and_looking_share_their_errors(
    on_two_ranks: OnTwoRanks, tmp_path: Path, failing: int
) -> None:
    broken = fail_on(failing, RuntimeError("out of memory"))
    errors = on_two_ranks(lambda world: sequences.gather(broken(world), world))
    assert_shared(errors, f"rank {failing} on ")
    assert_shared(on_two_ranks(lambda world: see_alike(world, tmp_path, broken(world))), "out of memory")
