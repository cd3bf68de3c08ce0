"""Workers take segments that nobody has, until there are none: as processes of one machine, or as the ranks of MPI.

Any number of workers gives one result.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from calm_scale.config.data import TokenizerConfig
from calm_scale.config.errors import EXIT_ERROR, CalmScaleError, first_cause
from data_prep.errors import (
    PrepError,
    explain,
)
from data_prep.inputs import Input
from data_prep.inputs.records import HARMLESS, Reader, Texts
from data_prep.prep.assemble import describe_records
from data_prep.prep.journal import Journal
from data_prep.prep.prep_plan import Plan
from data_prep.prep.segment import Task, TaskName, build_task
from data_prep.tokenizer import Tokenizer, load_tokenizer
from launchers.ranks import Alone, Ranks

_PROGRESS_SECONDS = 0.5
_CERTAIN = 1.5
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
    is_consequence = True


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
    """Carries out ``task`` on segments of ``plan``. ``number`` distinguishes the workers of an attempt."""

    def __init__(self, plan: Plan, journal: Journal, task: Task, number: int) -> None:
        self._plan, self._journal, self._task, self._number = plan, journal, task, number
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
        if self._journal.is_stopped():
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
        CalmScaleError: the error of the worker that failed; the others have ended by then.
    """
    if count == 1:
        Worker(plan, journal, build_task(task, plan, journal, tokenizer), 0).run()
        return
    spawn = multiprocessing.get_context("spawn")
    with _safe_path():
        pool = ProcessPoolExecutor(count, spawn, initializer=end_with_parent, initargs=(os.getpid(),))
        running = [pool.submit(_work, plan, journal, task, origin, number, count) for number in range(count)]
    try:
        wait(running)
    except BaseException:  # an interrupt: the pool waits for its workers
        journal.stop()
        raise
    finally:
        pool.shutdown()
    errors = [error for worker in running if (error := worker.exception()) is not None]
    if errors:
        raise _choose_error(errors)


def _choose_error(errors: list[BaseException]) -> BaseException:
    """The error that ended the others, rather than one that says that others failed."""
    error = first_cause(errors)
    if isinstance(error, BrokenProcessPool):
        return PrepError(
            "a worker ended without a message (out of memory?); rerun prep to go on where it was"
        )
    return error


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


def _work(
    plan: Plan, journal: Journal, task: TaskName, origin: TokenizerOrigin, number: int, count: int
) -> None:
    try:
        keep_to_share_of_cores(number, count)
        config, path = origin
        tokenizer = load_tokenizer(config, path, verified=True) if task == "encode" else None
        Worker(plan, journal, build_task(task, plan, journal, tokenizer), number).run()
    except BaseException as error:
        journal.stop()
        if isinstance(error, CalmScaleError):
            raise
        raise PrepError(explain(error, f"worker {number}")) from None


def end_with_parent(parent: int) -> None:
    """End this process when process ``parent``, which started it, is gone: nobody else would."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PROGRESS_SECONDS)
        os._exit(EXIT_ERROR)

    threading.Thread(target=watch, daemon=True).start()


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


class MpiRanks(Ranks):
    """The ranks of ``MPI.COMM_WORLD``."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD
        super().__init__(self._comm.Get_rank(), self._comm.Get_size())

    def gather_objects(self, value: Any) -> list[Any]:
        """See ``Ranks``."""
        return list(self._comm.allgather(value))

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """See ``Ranks``."""
        return self._comm.bcast(value, source)

    def maximum(self, values: Sequence[int]) -> list[int]:
        """See ``Ranks``."""
        return [max(column) for column in zip(*self._comm.allgather(list(values)), strict=True)]


def detect_ranks(environment: Mapping[str, str] | None = None) -> Ranks:
    """Alone without a launcher; the MPI world under mpirun or ``srun --mpi=pmix``.

    Raises:
        PrepError: the environment names several tasks and MPI finds another number of them.
    """
    env = os.environ if environment is None else environment
    stated = _stated(env)
    if _torchrun(env) and (stated is None or stated[0] <= 1):
        raise PrepError(
            f"prep was started by torchrun (WORLD_SIZE={env['WORLD_SIZE']}): every process would do all the work; "
            "start it with `mpirun -n N`, `srun --mpi=pmix`, or alone with prep.workers: N",
            mistake=True,
        )
    if stated is None or (stated[0] <= 1 and not _under_mpi(env)):
        return Alone()
    try:
        ranks = MpiRanks()
    except (ImportError, RuntimeError) as error:
        raise PrepError(
            f"{stated[1]}={stated[0]} says this is one of {stated[0]} tasks, but MPI cannot be used ({error}); "
            f"install mpi4py with an MPI library, or unset {stated[1]} and use prep.workers",
            mistake=True,
        ) from None
    if ranks.world_size != stated[0]:
        facts = ", ".join(f"{k}={env[k]}" for k in (*(name for name, _ in _SIZES), *_RANKS) if k in env)
        raise PrepError(
            f"the environment says {stated[0]} tasks ({facts}), MPI says {ranks.world_size}: each task would do "
            "all the work and write the same files. Start prep with `srun --mpi=pmix` or `mpirun -n N`; for one "
            f"process inside an allocation, unset {stated[1]}. Nothing was written",
            mistake=True,
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
