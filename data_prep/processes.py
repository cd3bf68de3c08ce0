"""Worker processes of one machine, when no MPI launcher is in charge."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from calm_scale.config.base import CalmScaleError
from calm_scale.config.data import TokenizerConfig
from data_prep.errors import PrepError
from data_prep.journal import Journal
from data_prep.plan import Plan
from data_prep.tokenizer import Tokenizer, load_tokenizer
from data_prep.worker import StoppedError, Worker

TokenizerOrigin = tuple[TokenizerConfig, Path]


def run_workers(
    plan: Plan, journal: Journal, origin: TokenizerOrigin, tokenizer: Tokenizer, count: int
) -> None:
    """Run ``count`` workers to the end; one of them alone runs in this process.

    Raises:
        CalmScaleError: the first worker's error; the others have ended by then.
    """
    if count == 1:
        Worker(plan, journal, tokenizer, 0).run()
        return
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = [
        context.Process(target=_work, args=(plan, journal, origin, number, os.getpid()), daemon=True)
        for number in range(count)
    ]
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
    if texts:
        return PrepError(texts[0] or "a worker failed and could not say why (is the disk full?)")
    return PrepError(
        f"worker {process.name} ended with exit code {process.exitcode} and no message (out of memory?); rerun prep "
        "to go on where it was"
    )


def _work(plan: Plan, journal: Journal, origin: TokenizerOrigin, number: int, parent: int) -> None:
    try:
        config, path = origin
        tokenizer = load_tokenizer(config, path, verified=True)
        Worker(plan, journal, tokenizer, number, parent=parent).run()
    except StoppedError:
        raise SystemExit(1) from None
    except CalmScaleError as error:
        journal.fail(number, str(error))
        raise SystemExit(1) from None
    except Exception:
        journal.fail(number, f"worker {number} failed unexpectedly:\n{traceback.format_exc()}")
        raise SystemExit(1) from None
