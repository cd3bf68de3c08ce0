"""A worker: takes segments that nobody has, until there are none. Any number of workers, one result."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from calm_scale.config.data import TokenizerConfig
from calm_scale.config.errors import CalmScaleError, ConfigError
from data_prep.errors import (
    CorruptSourceError,
    EncoderMismatchError,
    PrepError,
    PrepMistakeError,
    explain,
)
from data_prep.inputs import Input
from data_prep.inputs.records import HARMLESS, Reader, Texts
from data_prep.prep.assemble import describe_records
from data_prep.prep.journal import Journal
from data_prep.prep.prep_plan import Plan
from data_prep.prep.segment import Task, TaskName, build_task
from data_prep.tokenizer import Tokenizer, load_tokenizer

_PROGRESS_SECONDS = 0.5
_CERTAIN = 1.5
_MISMATCH = "encoder mismatch: "
_MISTAKE = "mistake: "
_DAMAGED = "damaged input: "
# (variable, what set it), the innermost launcher first: a step inside a job, mpirun inside an allocation.
_SIZES = (
    ("OMPI_COMM_WORLD_SIZE", "mpirun"),
    ("PMI_SIZE", "PMI"),
    ("MPI_LOCALNRANKS", "mpiexec"),
    ("SLURM_STEP_NUM_TASKS", "srun"),
    ("SLURM_NTASKS", "SLURM"),
    ("SLURM_NPROCS", "SLURM"),
)
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


class StoppedError(PrepError):
    """Another process of this attempt failed; its error is the one to show."""

    may_pass = True


@dataclass
class Progress:
    """What one worker has done so far in this attempt."""

    documents: int = 0
    quarantined: int = 0
    harmless: int = 0
    text_bytes: int = 0
    tokens: int = 0
    began: float = field(default_factory=time.time)
    ended: float = 0.0
    cpu_seconds: float = 0.0
    peak_megabytes: float = 0.0


class Worker:
    """Carries out ``task`` on segments of ``plan``. ``number`` distinguishes the workers of an attempt;
    ``parent`` is the process id whose end ends this worker."""

    def __init__(
        self, plan: Plan, journal: Journal, task: Task, number: int, parent: int | None = None
    ) -> None:
        self._plan, self._journal, self._task = plan, journal, task
        self._number, self._parent = number, parent
        self.progress = Progress()
        self._told = 0.0
        self._cpu_before = time.process_time()
        self._progress_file = journal.attempt_dir / "progress" / f"{task.name}-{number:05d}.json"

    def run(self) -> None:
        """Work until no segment is left.

        Raises:
            CalmScaleError: what stopped it.
        """
        try:
            for item in self._files_to_start():
                self._read_from(item, owner=True)
            num_inputs = len(self._plan.inputs)
            for i in range(num_inputs):
                self._read_from((i + self._number) % num_inputs, owner=False)
        finally:
            self._task.settle()
        self._tell(force=True)

    def _files_to_start(self) -> Iterator[int]:
        """Inputs nobody has begun, largest first, so that the long ones do not come last."""
        sizes = [-item.text_bytes for item in self._plan.inputs]
        for item in sorted(range(len(sizes)), key=lambda i: (sizes[i], i)):
            if self._journal.claim(f"{self._task.name}-{item:06d}"):
                yield item

    def _read_from(self, item: int, *, owner: bool) -> None:
        """Carry out unclaimed segments of one input. Its owner goes on to the end; a helper only takes segments
        that the input's size leads one to expect."""
        described = self._plan.inputs[item]
        expected = self._plan.expected_segments(described)
        reader: Reader | None = None
        segment = 0
        while owner or segment < expected:
            outcome = self._task.finished(item, segment)
            if outcome is None and self._journal.claim(f"{self._task.name}-{item:06d}-{segment:06d}"):
                if reader is None:
                    source = self._plan.prep.sources[described.source]
                    reader = Reader(described, source, self._plan.segment_bytes, segment)
                outcome = self._task.carry_out(reader, item, segment, partial(self._on_block, described))
                if outcome is None:
                    return
            if outcome is not None and outcome.last:
                return
            segment += 1

    def _on_block(self, item: Input, texts: Texts, tokens: int) -> None:
        harmless = sum(bad.kind in HARMLESS for bad in texts.bad)
        self.progress.documents += len(texts.texts)
        self.progress.quarantined += len(texts.bad) - harmless
        self.progress.harmless += harmless
        self.progress.text_bytes += texts.num_bytes
        self.progress.tokens += tokens
        self._refuse_hopeless(item)
        self._tell()

    def _refuse_hopeless(self, item: Input) -> None:
        """End early when this worker alone has met more bad records than the whole corpus may have."""
        done = self.progress
        if done.quarantined < 1000 or not self._plan.text_bytes:
            return
        records = (done.documents + done.quarantined) * max(
            1.0, self._plan.text_bytes / max(1, done.text_bytes)
        )
        if done.quarantined > _CERTAIN * self._plan.prep.max_bad_fraction * records:
            raise PrepError(
                f"{done.quarantined} bad records in the first {done.text_bytes / 1e6:.0f} MB, more than "
                f"prep.max_bad_fraction {self._plan.prep.max_bad_fraction:.3%} of the whole corpus allows: repair "
                f"the input, or raise the limit. The last were in {item.name}{describe_records(self._plan, item)}"
            )

    def _tell(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._told < _PROGRESS_SECONDS:
            return
        self._told = now
        self.progress.ended = time.time()
        self.progress.cpu_seconds = time.process_time() - self._cpu_before
        self.progress.peak_megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        part = self._progress_file.with_suffix(".part")
        with suppress(OSError):  # progress is for the eye; the records are the truth
            part.write_text(json.dumps(asdict(self.progress)), encoding="utf-8")
            part.replace(self._progress_file)
        if self._parent is not None and os.getppid() != self._parent:
            raise StoppedError("stopped because the process that started this worker is gone")
        if self._journal.failed():
            raise StoppedError("stopped because another process of this prep failed")


def total_progress(folder: Path, task: str) -> Progress:
    """The sum over the workers of an attempt; the first to begin, the last to end, the largest in memory."""
    total = Progress()
    for path in folder.glob(f"{task}-*.json"):
        try:
            one = Progress(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue
        total = Progress(
            documents=total.documents + one.documents,
            quarantined=total.quarantined + one.quarantined,
            harmless=total.harmless + one.harmless,
            text_bytes=total.text_bytes + one.text_bytes,
            tokens=total.tokens + one.tokens,
            began=min(total.began, one.began),
            ended=max(total.ended, one.ended),
            cpu_seconds=total.cpu_seconds + one.cpu_seconds,
            peak_megabytes=max(total.peak_megabytes, one.peak_megabytes),
        )
    return total


TokenizerOrigin = tuple[TokenizerConfig, Path]


def run_workers(
    plan: Plan, journal: Journal, task: TaskName, origin: TokenizerOrigin, tokenizer: Tokenizer, count: int
) -> None:
    """Run ``task`` with ``count`` workers to the end; one of them alone runs in this process.

    Raises:
        CalmScaleError: the first worker's error; the others have ended by then.
    """
    if count == 1:
        Worker(plan, journal, build_task(task, plan, journal, tokenizer), 0).run()
        return
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = [
        context.Process(
            target=_work, args=(plan, journal, task, origin, number, count, os.getpid()), daemon=True
        )
        for number in range(count)
    ]
    with _safe_path():
        for process in processes:
            process.start()
    try:
        _wait(processes, journal)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
        for process in processes:
            process.join()


@contextmanager
def _safe_path() -> Iterator[None]:
    """Python processes that are started here do not look for modules in the current folder: a ``select.py`` of the
    user's must not hide the library's."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def _wait(processes: list[BaseProcess], journal: Journal) -> None:
    running = list(processes)
    while running:
        wait([process.sentinel for process in running])
        for process in [p for p in running if not p.is_alive()]:
            running.remove(process)
            if process.exitcode:
                raise _error_of(process, journal)


def _error_of(process: BaseProcess, journal: Journal) -> CalmScaleError:
    texts = [
        p.read_text(encoding="utf-8")
        for p in sorted(journal.attempt_dir.glob("error-*"))
        if p.suffix != ".part"
    ]
    if texts and texts[0].startswith(_MISMATCH):
        reference, _, text = texts[0].removeprefix(_MISMATCH).partition("\n")
        return EncoderMismatchError(text, reference)
    if texts and texts[0].startswith(_MISTAKE):
        return PrepMistakeError(texts[0].removeprefix(_MISTAKE))
    if texts and texts[0].startswith(_DAMAGED):
        return CorruptSourceError(texts[0].removeprefix(_DAMAGED))
    if texts:
        return PrepError(texts[0] or "a worker failed and could not say why (is the disk full?)")
    return PrepError(
        f"worker {process.name} ended with exit code {process.exitcode} and no message (out of memory?); rerun prep "
        "to go on where it was"
    )


def _work(
    plan: Plan,
    journal: Journal,
    task: TaskName,
    origin: TokenizerOrigin,
    number: int,
    count: int,
    parent: int,
) -> None:
    try:
        keep_to_share_of_cores(number, count)
        config, path = origin
        tokenizer = load_tokenizer(config, path, verified=True) if task == "encode" else None
        Worker(plan, journal, build_task(task, plan, journal, tokenizer), number, parent).run()
    except StoppedError:
        raise SystemExit(1) from None
    except EncoderMismatchError as error:
        journal.fail(number, f"{_MISMATCH}{error.reference}\n{error}")
        raise SystemExit(1) from None
    except ConfigError as error:
        journal.fail(number, f"{_MISTAKE}{error}")
        raise SystemExit(1) from None
    except CorruptSourceError as error:
        journal.fail(number, f"{_DAMAGED}{error}")
        raise SystemExit(1) from None
    except Exception as error:
        journal.fail(number, explain(error, f"worker {number}"))
        raise SystemExit(1) from None


def keep_to_share_of_cores(number: int, count: int) -> None:
    """Of the cores this process may use, worker ``number`` of ``count`` keeps to an equal share of its own.

    Its threads then find their data in that core's cache, and the scheduler does not move them about. Nothing
    happens when there are more workers than cores, or where the system refuses.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // count
    if share:
        with suppress(OSError):
            os.sched_setaffinity(0, cores[number * share : (number + 1) * share])


class MpiMismatchError(PrepMistakeError):
    """The launcher's environment and MPI disagree about the number of processes."""


class Ranks(Protocol):
    """The collective operation a prep needs."""

    @property
    def rank(self) -> int:
        """This process, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank, in rank order."""
        ...


@dataclass(frozen=True)
class Alone:
    """One process."""

    rank: int = 0
    size: int = 1

    def gather(self, value: Any) -> list[Any]:
        """The value alone."""
        return [value]


class MpiRanks:
    """The ranks of ``MPI.COMM_WORLD``."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD

    @property
    def rank(self) -> int:
        """See ``Ranks``."""
        return int(self._comm.Get_rank())

    @property
    def size(self) -> int:
        """See ``Ranks``."""
        return int(self._comm.Get_size())

    def gather(self, value: Any) -> list[Any]:
        """See ``Ranks``."""
        return list(self._comm.allgather(value))


def detect_ranks(environment: Mapping[str, str] | None = None) -> Ranks:
    """Alone without a launcher; the MPI world under mpirun or ``srun --mpi=pmix``.

    Raises:
        MpiMismatchError: the environment names several tasks and MPI finds another number of them.
    """
    env = os.environ if environment is None else environment
    stated = _stated(env)
    if _torchrun(env) and (stated is None or stated[0] <= 1):
        raise MpiMismatchError(
            f"prep was started by torchrun (WORLD_SIZE={env['WORLD_SIZE']}): every process would do all the work; "
            "start it with `mpirun -n N`, `srun --mpi=pmix`, or alone with prep.workers: N"
        )
    if stated is None or (stated[0] <= 1 and not _under_mpi(env)):
        return Alone()
    try:
        ranks = MpiRanks()
    except (ImportError, RuntimeError) as error:
        raise MpiMismatchError(
            f"{stated[1]}={stated[0]} says this is one of {stated[0]} tasks, but MPI cannot be used ({error}); "
            f"install mpi4py with an MPI library, or unset {stated[1]} and use prep.workers"
        ) from None
    if ranks.size != stated[0]:
        facts = ", ".join(f"{k}={env[k]}" for k in (*(name for name, _ in _SIZES), *_RANKS) if k in env)
        raise MpiMismatchError(
            f"the environment says {stated[0]} tasks ({facts}), MPI says {ranks.size}: each task would do all the "
            "work and write the same files. Start prep with `srun --mpi=pmix` or `mpirun -n N`; for one process "
            f"inside an allocation, unset {stated[1]}. Nothing was written"
        )
    return ranks


def _stated(env: Mapping[str, str]) -> tuple[int, str] | None:
    for name, _ in _SIZES:
        if env.get(name, "").isdigit():
            return int(env[name]), name
    return None


def _under_mpi(env: Mapping[str, str]) -> bool:
    return "OMPI_COMM_WORLD_SIZE" in env or "PMI_SIZE" in env


def _torchrun(env: Mapping[str, str]) -> bool:
    size = env.get("WORLD_SIZE", "")
    return "TORCHELASTIC_RUN_ID" in env and size.isdigit() and int(size) > 1
