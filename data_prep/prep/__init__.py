"""``prepare``: raw text → shards and manifests, alone, with worker processes, or under MPI; the same bytes."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from calm_scale.config import RunConfig
from calm_scale.config.errors import CalmScaleError
from calm_scale.config.terminal import counted
from data_prep.errors import (
    EncoderMismatchError,
    PrepError,
    ShardError,
    StarvedSplitError,
    explain,
)
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
from data_prep.prep.workers import Ranks, StoppedError, Worker, detect_ranks, run_workers, total_progress
from data_prep.shards import read_header
from data_prep.shards.compressed import ColdShard, remove_unnamed
from data_prep.shards.manifest import FolderLock, Manifest, TokenCounts, check_lock
from data_prep.tokenizer import Tokenizer, load_tokenizer

T = TypeVar("T")
LOG_NAME = "prep.log.jsonl"
_POLL_SECONDS = 0.5
_LOG_SECONDS = 5.0
_PLAIN_SECONDS = 30.0


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
    show: bool = True,
    on_accepted: Callable[[], object] = lambda: None,
) -> PrepReport:
    """Carry out the ``prep`` section of ``config`` into ``config.data_dir``.

    Under mpirun or ``srun --mpi=pmix`` every rank is a worker; otherwise ``prep.workers`` processes are. An
    interrupted prep goes on where it was; a finished one is recognised and left as it is. ``restart`` discards
    earlier work first. ``show`` draws a progress line and the summary (rank 0). ``on_accepted`` is called there when
    nothing speaks against these settings in this folder.

    Raises:
        CalmScaleError: on every rank, with the text of the error that ended the run.
    """
    ranks = detect_ranks() if ranks is None else ranks
    try:
        report = _prepare(config, ranks, on_accepted, restart=restart, show=show)
    except EncoderMismatchError as error:
        if config.tokenizer.on_mismatch != "fallback":
            raise
        reference = config.tokenizer.model_copy(update={"encoder": error.reference})
        config = config.model_copy(update={"tokenizer": reference})
        report = _prepare(config, ranks, on_accepted, restart=True, show=show)
    if show and ranks.rank == 0:
        report.show()
    return report


def _prepare(
    config: RunConfig, ranks: Ranks, on_accepted: Callable[[], object], *, restart: bool, show: bool
) -> PrepReport:
    started = time.perf_counter()
    with ExitStack() as stack:
        loaded: list[Tokenizer] = []

        def begin() -> _Begun | None:
            if ranks.rank:
                return None
            found = _begin(config, stack, loaded, restart=restart)
            on_accepted()
            return found

        begun = _together(ranks, begin)[0]
        if begun is None:
            raise PrepError("rank 0 did not begin")
        if begun.done is not None:
            return begun.done
        tokenizer = _together_quietly(ranks, lambda: _tokenizer(config, loaded))
        if begun.plan.prep.deduplicate:
            _pass(config, begun, "hash", tokenizer, ranks, show)
            _together(
                ranks,
                lambda: find_duplicates(begun.journal, len(begun.plan.inputs)) if ranks.rank == 0 else 0,
            )
        try:
            _pass(config, begun, "encode", tokenizer, ranks, show)
        except EncoderMismatchError:
            if ranks.rank == 0:
                begun.journal.clear()  # the encoder was wrong from the start, not from this document on
            raise

        def conclude() -> PrepReport | None:
            return _conclude(begun, tokenizer, ranks, started) if ranks.rank == 0 else None

        report = _together(ranks, conclude)[0]
        if report is None:
            raise PrepError("rank 0 did not finish")
        return report


def _together(ranks: Ranks, action: Callable[[], T]) -> list[T]:
    """Every rank's result on every rank; one rank's error ends all of them with its text."""
    result: T | None = None
    failure: CalmScaleError | None = None
    try:
        result = action()
    except CalmScaleError as error:
        failure = error
    except Exception as error:
        failure = PrepError(explain(error, f"rank {ranks.rank}"))
    outcomes = ranks.gather((result, failure))
    errors = [error for _, error in outcomes if error is not None]
    if errors:
        raise next((e for e in errors if not isinstance(e, StoppedError)), errors[0])
    return [value for value, _ in outcomes]


def _together_quietly(ranks: Ranks, action: Callable[[], T]) -> T:
    """Like ``_together`` for results that cannot be sent: everyone keeps its own."""
    kept: list[T] = []
    _together(ranks, lambda: kept.append(action()))
    return kept[0]


def _tokenizer(config: RunConfig, loaded: list[Tokenizer]) -> Tokenizer:
    return loaded[0] if loaded else load_tokenizer(config.tokenizer, config.tokenizer_path, verified=True)


@dataclass(frozen=True)
class Foresight:
    """What a prep would do now: its plan, and what it would find in the data folder, in words."""

    plan: Plan
    found: str


def foresee(config: RunConfig, *, restart: bool = False) -> Foresight:
    """What ``prepare`` would do, without writing anything.

    Raises:
        CalmScaleError: the error with which ``prepare`` would refuse.
    """
    plan = make_plan(config, load_tokenizer(config.tokenizer, config.tokenizer_path))
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


def _begin(config: RunConfig, stack: ExitStack, loaded: list[Tokenizer], *, restart: bool) -> _Begun:
    """Rank 0: verify the tokenizer, make the plan, take the folder."""
    loaded.append(load_tokenizer(config.tokenizer, config.tokenizer_path))
    plan = make_plan(config, loaded[0])
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
        PrepMistakeError: it is the prep of other settings or inputs.
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
                (ColdShard if entry.compressed else read_header)(folder / entry.name)
    except ShardError as error:
        raise ShardError(
            f"{error}\n{journal.data_dir} was finished and is damaged now: bring the file back, or prepare all of it "
            "again with --restart"
        ) from None
    return report.model_copy(update={"already_done": True})


def _pass(
    config: RunConfig, begun: _Begun, task: TaskName, tokenizer: Tokenizer, ranks: Ranks, show: bool
) -> None:
    """One pass over the corpus by every rank."""
    with ExitStack() as stack:
        if ranks.rank == 0:
            stack.enter_context(ProgressLine(begun.plan, begun.journal, task, show=show))
        _together(ranks, lambda: _work(config, begun, task, tokenizer, ranks))


def _work(config: RunConfig, begun: _Begun, task: TaskName, tokenizer: Tokenizer, ranks: Ranks) -> None:
    plan, journal = begun.plan, begun.journal
    try:
        if ranks.size > 1:
            launcher = os.getppid()  # when it is gone, nobody else would end this rank
            Worker(plan, journal, build_task(task, plan, journal, tokenizer), ranks.rank, launcher).run()
        else:
            origin = (config.tokenizer, config.tokenizer_path)
            run_workers(plan, journal, task, origin, tokenizer, plan.prep.workers)
    except StoppedError:
        raise
    except BaseException as error:
        journal.fail(ranks.rank, explain(error, f"rank {ranks.rank}"))
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
        workers=ranks.size if ranks.size > 1 else plan.prep.workers,
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


class ProgressLine:
    """Shows and logs the sum over all workers while the ``with`` block runs."""

    def __init__(self, plan: Plan, journal: Journal, task: str, *, show: bool) -> None:
        self._plan, self._journal, self._task, self._show = plan, journal, task, show
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._started = time.monotonic()
        self._console = Console(file=sys.stderr)

    def __enter__(self) -> ProgressLine:
        log_event(
            self._journal.data_dir,
            "start",
            task=self._task,
            plan=self._plan.key,
            text_bytes=self._plan.text_bytes,
        )
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._stop.set()
        self._thread.join()
        event = "workers done" if kind is None else "failed"
        log_event(
            self._journal.data_dir,
            event,
            **self._numbers(),
            **({"error": str(error) or kind.__name__} if kind else {}),
        )

    def _numbers(self) -> dict[str, Any]:
        return asdict(total_progress(self._journal.attempt_dir / "progress", self._task))

    def _run(self) -> None:
        columns = (
            TextColumn(f"prep · {self._task}"),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
        )
        terminal = self._show and self._console.is_terminal
        with Progress(*columns, console=self._console, transient=True, disable=not terminal) as bar:
            task = bar.add_task(
                "prep", total=max(1, self._plan.text_bytes) if self._plan.text_bytes else None, numbers=""
            )
            logged = told = time.monotonic()
            while not self._stop.wait(_POLL_SECONDS):
                numbers = self._numbers()
                line = self._line(numbers)
                bar.update(task, completed=numbers["text_bytes"], numbers=line)
                now = time.monotonic()
                if now - logged >= _LOG_SECONDS:
                    logged = now
                    log_event(self._journal.data_dir, "progress", **numbers)
                if self._show and not terminal and now - told >= _PLAIN_SECONDS:
                    told = now
                    self._console.print(f"prep: {line}", highlight=False)

    def _line(self, numbers: dict[str, Any]) -> str:
        seconds = max(1e-9, time.monotonic() - self._started)
        return (
            f"{numbers['documents']:,} documents · {numbers['text_bytes'] / seconds / 1e6:.1f} MB/s · "
            f"{numbers['tokens'] / seconds / 1e6:.2f} Mtok/s · {numbers['quarantined']:,} quarantined"
        )


def log_event(data_dir: Path, event: str, **values: Any) -> None:
    """Append one line to ``data/prep.log.jsonl``; a full disk does not stop the run here."""
    line = json.dumps({"time": round(time.time(), 3), "event": event, **values})
    try:
        with (data_dir / LOG_NAME).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError:
        return
