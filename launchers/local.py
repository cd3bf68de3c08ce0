"""Several ranks on this machine, without torchrun: signals reach the ranks, nobody is killed during a save.

`launch` starts N copies of a command as ranks 0..N-1, hands TERM, INT, USR1, USR2 (and HUP, as TERM) on to each of
them and waits. Rank 0 keeps the terminal (progress bars work); the others write to log files. When one rank fails
the others are ended within a settable time. Whatever happens to the launcher, `kill -9` included, no rank outlives it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from calm_scale.config.errors import EXIT_REQUEUE
from calm_scale.config.terminal import survive_any_output
from launchers.claims import MARK
from launchers.environment import refuse_unknown_interface
from launchers.errors import LaunchError
from launchers.meeting import PortLease
from launchers.process import Guard, RankProcess, Verdict, cores_per_rank, wait_for_any

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_POLL_SECONDS = 0.2


def launch(
    argv: Sequence[str],
    nproc: int,
    env: Mapping[str, str] | None = None,
    *,
    log_dir: Path | None = None,
    grace: float | None = None,
    end_others_within: float = 15.0,
    retries_on_taken_port: int = 2,
    ends_process: bool = False,
) -> int:
    """Run ``argv`` as ``nproc`` ranks and return one exit code.

    Args:
        argv: the command of every rank.
        env: the environment to start from (default: this process's).
        log_dir: where ranks 1.. write ``rank_0001.log``; a temporary folder, removed on success, when None.
        grace: seconds between a forwarded TERM or INT and the kill; None waits as long as the ranks need.
        end_others_within: seconds that the other ranks get once one has failed.
        retries_on_taken_port: fresh starts with another port when rank 0 finds its port taken.
        ends_process: this process ends with the launch. Once the ranks are gone, the signals that were handed on are
            ignored instead of given back: a late one must not replace the exit code.

    Returns:
        0 when all ranks returned 0; 75 when they saved and want a requeue; else the first failing rank's code
        (128 + signal number when a signal ended it).

    Raises:
        LaunchError: ``nproc`` is not positive, or the command does not exist.
    """
    if nproc < 1:
        raise LaunchError(f"{nproc} processes cannot be started; --nproc must be at least 1")
    if shutil.which(argv[0]) is None:
        raise LaunchError(f"command {argv[0]!r} was not found")
    source = dict(os.environ if env is None else env)
    if nproc > 1:
        refuse_unknown_interface(source)
    logs = _Logs(log_dir)
    for _ in range(retries_on_taken_port + 1):
        verdict = _World(argv, nproc, source, logs.path, grace, end_others_within, ends_process).run()
        if not verdict.port_was_taken:
            break
    if verdict.failed:
        sys.stderr.write(verdict.text() + "\n")
    logs.close(verdict.failed)
    return verdict.code


def rank_environment(
    source: Mapping[str, str], rank: int, nproc: int, port: int, cores: int
) -> dict[str, str]:
    """The environment of one rank: what torchrun would set, and OpenMP threads for the cores it may use."""
    clean = {
        name: value
        for name, value in source.items()
        if not name.startswith(("TORCHELASTIC_", "GROUP_", "CROSS_"))
    }
    return {
        "OMP_NUM_THREADS": str(cores),
        **clean,
        MARK: "local",
        "RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


class _World:
    """One start of all ranks, from spawn to the last exit."""

    def __init__(
        self,
        argv: Sequence[str],
        nproc: int,
        source: Mapping[str, str],
        logs: Path,
        grace: float | None,
        end_others_within: float,
        ends_process: bool,
    ) -> None:
        self._ends_process = ends_process
        self._argv, self._nproc, self._source, self._logs = argv, nproc, source, logs
        self._grace, self._end_others_within = grace, end_others_within
        self._ranks: list[RankProcess] = []
        self._kill_at: float | None = None
        self._first: RankProcess | None = None
        self._told: signal.Signals | None = None

    def run(self) -> Verdict:
        with PortLease() as lease, Guard() as guard, self._forwarding():
            try:
                self._spawn(lease.port, guard)
                self._wait()
            finally:
                for rank in self._ranks:
                    rank.kill_group()
        verdict = Verdict.of(self._first, self._ranks)
        saved = any(rank.code == EXIT_REQUEUE for rank in self._ranks)
        if saved or self._told is None or verdict.code != 128 + self._told:
            return verdict
        sys.stderr.write(f"ended by {self._told.name} as asked, before the ranks had anything to save\n")
        return Verdict(verdict.code)

    def _spawn(self, port: int, guard: Guard) -> None:
        cores = cores_per_rank(self._nproc, self._source)
        for rank in range(self._nproc):
            environment = rank_environment(self._source, rank, self._nproc, port, cores)
            log = self._logs / f"rank_{rank:04d}.log"
            process = RankProcess(rank, self._argv, environment, log, keeps_terminal=rank == 0)
            guard.watch(process.pid)
            self._ranks.append(process)

    def _wait(self) -> None:
        while running := [rank for rank in self._ranks if rank.poll() is None]:
            if self._first is None:
                self._first = next((r for r in self._ranks if r.code not in (None, 0, EXIT_REQUEUE)), None)
                if self._first is not None:
                    self._end(running, self._end_others_within)
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                for rank in running:
                    rank.kill_group()
            wait_for_any(running, _POLL_SECONDS)
        if self._first is None:
            self._first = next((rank for rank in self._ranks if rank.code not in (0, EXIT_REQUEUE)), None)

    def _end(self, running: Sequence[RankProcess], within: float) -> None:
        self._kill_at = min(self._kill_at or float("inf"), time.monotonic() + within)
        for rank in running:
            rank.send(signal.SIGTERM)

    @contextlib.contextmanager
    def _forwarding(self) -> Iterator[None]:
        """Hand signals on while the block runs; only a main thread can, elsewhere the caller keeps them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in _FORWARDED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if self._ends_process else handler)

    def _on_signal(self, number: int, _frame: object) -> None:
        # A closed terminal is a request to stop; the ranks know TERM for that.
        handed_on = signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number)
        self._told = handed_on
        for rank in self._ranks:
            rank.send(handed_on)
        if self._grace is not None and handed_on in (signal.SIGTERM, signal.SIGINT):
            self._kill_at = min(self._kill_at or float("inf"), time.monotonic() + self._grace)


class _Logs:
    """The folder of the ranks' logs; a temporary one goes away unless something failed."""

    def __init__(self, log_dir: Path | None) -> None:
        self._temporary = log_dir is None
        self.path = Path(tempfile.mkdtemp(prefix="calm-scale-ranks-")) if log_dir is None else log_dir
        self.path.mkdir(parents=True, exist_ok=True)

    def close(self, failed: bool) -> None:
        if self._temporary and not failed:
            shutil.rmtree(self.path, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m launchers.local --nproc N [--log-dir DIR] -- COMMAND …``."""
    parser = argparse.ArgumentParser(prog="python -m launchers.local", description=__doc__)
    parser.add_argument("--nproc", type=int, required=True, help="number of ranks")
    parser.add_argument("--log-dir", type=Path, help="folder for the logs of ranks 1 and up")
    parser.add_argument("--grace", type=float, help="seconds between TERM and KILL (default: no limit)")
    parser.add_argument(
        "--end-others-within", type=float, default=15.0, help="seconds after the first failure"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command, after --")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command given")
    try:
        return launch(
            command,
            options.nproc,
            log_dir=options.log_dir,
            grace=options.grace,
            end_others_within=options.end_others_within,
            ends_process=True,
        )
    except LaunchError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


if __name__ == "__main__":
    survive_any_output()
    sys.exit(main())
