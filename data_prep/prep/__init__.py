"""``prepare``: raw text → shards and manifests, alone, with worker processes, or under MPI; the same bytes."""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from calm_scale.config import RunConfig
from calm_scale.config.errors import CalmScaleError
from calm_scale.config.quantities import counted
from data_prep.errors import (
    EncoderMismatchError,
    PrepError,
    ShardError,
    StarvedSplitError,
    explain,
)
from data_prep.inputs import ignore
from data_prep.prep.assemble import (
    check_limit,
    collect,
    reweigh,
    write_rejected,
    write_split,
)
from data_prep.prep.journal import UNFINISHED, Journal, has_digest
from data_prep.prep.prep_plan import Plan, check_disk, make_plan
from data_prep.prep.prep_report import PrepReport, store_definition, summarise
from data_prep.prep.segment import TaskName, build_task, find_duplicates
from data_prep.prep.workers import (
    Progress,
    StoppedError,
    Worker,
    detect_ranks,
    end_with_parent,
    run_workers,
    total_progress,
)
from data_prep.shards import read_header
from data_prep.shards.compressed import CompressedShard, remove_unnamed
from data_prep.shards.manifest import FolderLock, Manifest, TokenCounts, check_lock
from data_prep.tokenizer import Tokenizer, load_tokenizer
from launchers.ranks import Ranks

T = TypeVar("T")
LOG_NAME = "prep.log.jsonl"
_POLL_SECONDS = 0.5
_LOG_SECONDS = 5.0


@dataclass(frozen=True)
class PassProgress:
    """How far a pass over the corpus is.

    Attributes:
        task: the pass, ``hash`` or ``encode``.
        text_bytes: estimated bytes of text of the whole corpus; 0 where that is not known.
        seconds: since the pass began.
        done: the sum over all workers.
    """

    task: TaskName
    text_bytes: int
    seconds: float
    done: Progress


@dataclass(frozen=True)
class _Listener:
    """What the caller is told of, by rank 0."""

    tell: Callable[[str], object]
    on_accepted: Callable[[], object]
    on_progress: Callable[[PassProgress], object]


@dataclass(frozen=True)
class _Begun:
    """What rank 0 decided for everyone."""

    plan: Plan
    journal: Journal
    done: PrepReport | None = None


def prepare(
    config: RunConfig,
    *,
    ranks: Ranks | None = None,
    restart: bool = False,
    tell: Callable[[str], object] = ignore,
    on_accepted: Callable[[], object] = lambda: None,
    on_progress: Callable[[PassProgress], object] = lambda seen: None,
) -> PrepReport:
    """Carry out the ``prep`` section of ``config`` into ``config.data_dir``.

    Under mpirun or ``srun --mpi=pmix`` every rank is a worker; otherwise ``prep.workers`` processes are. An
    interrupted prep goes on where it was; a finished one is recognised and left as it is. Rank 0 calls the last three.

    Args:
        restart: discard earlier work first.
        tell: is given a line on inputs that are left out.
        on_accepted: is called when nothing speaks against these settings in this folder.
        on_progress: is called twice a second, from a thread.

    Raises:
        CalmScaleError: on every rank, the error that ended the run.
    """
    ranks = detect_ranks() if ranks is None else ranks
    listener = _Listener(tell, on_accepted, on_progress)
    try:
        return _prepare(config, ranks, listener, restart=restart)
    except EncoderMismatchError as error:
        if config.tokenizer.on_mismatch != "fallback":
            raise
        reference = config.tokenizer.model_copy(update={"encoder": error.reference})
        config = config.model_copy(update={"tokenizer": reference})
        return _prepare(config, ranks, listener, restart=True)


def _prepare(config: RunConfig, ranks: Ranks, listener: _Listener, *, restart: bool) -> PrepReport:
    started = time.perf_counter()
    with ExitStack() as stack:
        loaded: list[Tokenizer] = []

        def begin() -> _Begun:
            found = _begin(config, stack, loaded, listener.tell, restart=restart)
            listener.on_accepted()
            return found

        begun = _on_first(ranks, begin)
        if begun.done is not None:
            return begun.done
        tokenizer = _everywhere(ranks, lambda: _load(config, loaded))
        if begun.plan.prep.deduplicate:
            _pass(config, begun, "hash", tokenizer, ranks, listener)
            _on_first(ranks, lambda: find_duplicates(begun.journal, len(begun.plan.inputs)))
        try:
            _pass(config, begun, "encode", tokenizer, ranks, listener)
        except EncoderMismatchError:
            if ranks.rank == 0:
                begun.journal.clear()  # the encoder was wrong from the start, not from this document on
            raise
        return _on_first(ranks, lambda: _conclude(begun, tokenizer, ranks, started))


def _on_first(ranks: Ranks, work: Callable[[], T]) -> T:
    """The result of rank 0 on every rank; its error is raised on every rank."""
    return ranks.on_first(lambda: _explained(ranks, work))


def _everywhere(ranks: Ranks, work: Callable[[], T]) -> T:
    """Each rank's own result, which is not sent; one rank's error is raised on every rank."""
    own: list[T] = []
    ranks.everywhere(lambda: own.append(_explained(ranks, work)))
    return own[0]


def _explained(ranks: Ranks, work: Callable[[], T]) -> T:
    try:
        return work()
    except CalmScaleError:
        raise
    except Exception as error:
        raise PrepError(explain(error, f"rank {ranks.rank}")) from error


def _load(config: RunConfig, loaded: list[Tokenizer]) -> Tokenizer:
    return loaded[0] if loaded else load_tokenizer(config.tokenizer, config.tokenizer_path, verified=True)


@dataclass(frozen=True)
class Foresight:
    """What a prep would do now: its plan, and what it would find in the data folder, in words."""

    plan: Plan
    found: str


def foresee(config: RunConfig, *, restart: bool = False, tell: Callable[[str], object] = ignore) -> Foresight:
    """What ``prepare`` would do, without writing anything.

    Raises:
        CalmScaleError: the error with which ``prepare`` would refuse.
    """
    plan = make_plan(config, load_tokenizer(config.tokenizer, config.tokenizer_path), tell)
    journal = Journal(config.data_dir, "foreseen")
    check_lock(config.data_dir)
    if not restart and _find_done(plan, journal) is not None:
        return Foresight(plan, "already complete: nothing would be redone")
    check_disk(plan, config.data_dir)
    if restart:
        return Foresight(plan, "earlier work would be discarded")
    journal.refuse_other_plan(plan, UNFINISHED)
    finished = journal.count_records()
    found = (
        f"{counted(finished, 'segment')} finished, which would not be redone" if finished else "nothing yet"
    )
    return Foresight(plan, found)


def _begin(
    config: RunConfig,
    stack: ExitStack,
    loaded: list[Tokenizer],
    tell: Callable[[str], object],
    *,
    restart: bool,
) -> _Begun:
    """Rank 0: verify the tokenizer, make the plan, take the folder."""
    loaded.append(load_tokenizer(config.tokenizer, config.tokenizer_path))
    plan = make_plan(config, loaded[0], tell)
    journal = Journal(config.data_dir, uuid.uuid4().hex[:12])
    stack.enter_context(FolderLock(config.data_dir))
    if not restart and (done := _find_done(plan, journal)) is not None:
        if journal.has_plan:
            journal.store_plan(plan)  # the times of inputs that were found to be the same
        return _Begun(plan, journal, reweigh(plan, journal.data_dir, done))
    check_disk(plan, config.data_dir)
    journal.open(plan, restart=restart)
    return _Begun(plan, journal)


def _find_done(plan: Plan, journal: Journal) -> PrepReport | None:
    """The report of a finished prep of this very plan whose shards are all there.

    Raises:
        PrepError: it is the prep of other settings or inputs.
        ShardError: it was finished, and is damaged now.
    """
    report = PrepReport.read(journal.data_dir)
    if report is None or (journal.root / "records").exists():
        return None
    recorded = dict(enumerate(report.contents))

    def has_same_content(item: int) -> bool | None:
        return has_digest(plan, item, recorded.get(item, ""))

    lost_plan = report.plan == plan.key and not journal.has_plan
    if not lost_plan or any(has_same_content(item) is False for item in range(len(plan.inputs))):
        journal.refuse_other_plan(plan, "a finished prep", has_same_content)
    try:
        for split in report.splits:
            folder = journal.data_dir / split.name
            for entry in Manifest.read(folder).shards:
                (CompressedShard if entry.compressed else read_header)(folder / entry.name)
    except ShardError as error:
        raise ShardError(
            f"{error}\n{journal.data_dir} was finished and is damaged now: bring the file back, or prepare all of it "
            "again with --restart"
        ) from None
    return report.model_copy(update={"already_done": True})


def _pass(
    config: RunConfig, begun: _Begun, task: TaskName, tokenizer: Tokenizer, ranks: Ranks, listener: _Listener
) -> None:
    """One pass over the corpus by every rank."""
    with ExitStack() as stack:
        if ranks.rank == 0:
            stack.enter_context(_PassWatch(begun.plan, begun.journal, task, listener.on_progress))
        _everywhere(ranks, lambda: _work(config, begun, task, tokenizer, ranks))


def _work(config: RunConfig, begun: _Begun, task: TaskName, tokenizer: Tokenizer, ranks: Ranks) -> None:
    plan, journal = begun.plan, begun.journal
    try:
        if ranks.world_size > 1:
            end_with_parent(os.getppid())
            Worker(plan, journal, build_task(task, plan, journal, tokenizer), ranks.rank).run()
        else:
            origin = (config.tokenizer, config.tokenizer_path)
            run_workers(plan, journal, task, origin, tokenizer, plan.prep.workers)
    except StoppedError:
        raise
    except BaseException:
        journal.stop()
        raise


def _conclude(begun: _Begun, tokenizer: Tokenizer, ranks: Ranks, started: float) -> PrepReport:
    """Rank 0: join, check and commit."""
    plan, journal = begun.plan, begun.journal
    records, totals = collect(plan, journal)
    rejected = write_rejected(plan, journal, records, totals)
    check_limit(plan, totals, rejected)
    try:
        manifests = [write_split(plan, journal, tokenizer, split, records, totals) for split in plan.splits]
    except StarvedSplitError:
        journal.clear()  # other settings are needed, so nothing of this is worth keeping
        raise
    if plan.tokenizer_config.path is not None:
        store_definition(plan.tokenizer_config.path, journal.data_dir)
    for manifest in manifests:
        manifest.write(journal.data_dir / manifest.split)
        remove_unnamed(journal.data_dir / manifest.split, manifest)
    work = total_progress(journal.attempt_dir / "progress", "encode")
    names = TokenCounts.model_fields
    report = PrepReport(
        plan=plan.key,
        data_dir=journal.data_dir,
        documents={
            "read": totals.read,
            "kept": totals.kept,
            "filtered": totals.filtered,
            "duplicates": totals.duplicates,
            "quarantined": dict(sorted(totals.quarantined.items())),
        },
        tokens={name: sum(getattr(m.tokens, name) for m in manifests) for name in names},
        splits=[summarise(manifest) for manifest in manifests],
        text_bytes=totals.text_bytes,
        contents=totals.contents,
        seconds=time.perf_counter() - started,
        steady_seconds=max(0.0, work.ended - work.began),
        steady_bytes=work.text_bytes,
        steady_cpu_seconds=work.cpu_seconds,
        peak_megabytes=work.peak_megabytes,
        workers=ranks.world_size if ranks.world_size > 1 else plan.prep.workers,
        encoder=tokenizer.encoder_name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        corrupt_inputs=totals.corrupt,
        sources=totals.sources,
        unusable_inputs=totals.unusable,
        notes=dict(sorted(totals.notes.items())),
        quarantine=rejected,
    )
    report.write()
    log_event(journal.data_dir, "done", **report.model_dump(mode="json", exclude={"splits", "data_dir"}))
    journal.discard_work()
    return report


class _PassWatch:
    """Logs the sum over all workers while the ``with`` block runs, and hands it on twice a second."""

    def __init__(
        self, plan: Plan, journal: Journal, task: TaskName, on_progress: Callable[[PassProgress], object]
    ) -> None:
        self._plan, self._journal, self._task, self._on_progress = plan, journal, task, on_progress
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._started = time.monotonic()

    def __enter__(self) -> None:
        plan = self._plan
        log_event(self._journal.data_dir, "start", task=self._task, plan=plan.key, text_bytes=plan.text_bytes)
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._stop.set()
        self._thread.join()
        failure = {"error": str(error) or kind.__name__} if kind else {}
        event = "failed" if kind else "workers done"
        log_event(self._journal.data_dir, event, **asdict(self._sum()), **failure)

    def _sum(self) -> Progress:
        return total_progress(self._journal.attempt_dir / "progress", self._task)

    def _run(self) -> None:
        logged = time.monotonic()
        while not self._stop.wait(_POLL_SECONDS):
            done, now = self._sum(), time.monotonic()
            self._on_progress(PassProgress(self._task, self._plan.text_bytes, now - self._started, done))
            if now - logged >= _LOG_SECONDS:
                logged = now
                log_event(self._journal.data_dir, "progress", **asdict(done))


def log_event(data_dir: Path, event: str, **values: Any) -> None:
    """Append one line to ``data/prep.log.jsonl``; a full disk does not stop the run here."""
    line = json.dumps({"time": round(time.time(), 3), "event": event, **values})
    try:
        with (data_dir / LOG_NAME).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError:
        return
