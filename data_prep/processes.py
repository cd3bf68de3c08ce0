"""Worker processes of one machine, when no MPI launcher is in charge."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from calm_scale.config.data import TokenizerConfig
from calm_scale.config.errors import CalmScaleError, ConfigError
from data_prep.errors import CorruptSourceError, EncoderMismatchError, PrepError, PrepMistakeError, explain
from data_prep.journal import Journal
from data_prep.plan import Plan
from data_prep.tasks import TaskName, build_task
from data_prep.tokenizer import Tokenizer, load_tokenizer
from data_prep.worker import StoppedError, Worker

TokenizerOrigin = tuple[TokenizerConfig, Path]
_MISMATCH = "encoder mismatch: "
_MISTAKE = "mistake: "
_DAMAGED = "damaged input: "


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
