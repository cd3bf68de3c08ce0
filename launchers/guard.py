"""A second process that ends the ranks when the launcher is killed: their helpers too, which prctl does not reach."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

# Reads process-group numbers until its input closes: by `close` (the word "done" came first) or by the launcher's
# death (it did not). In a session of its own, so that a terminal's Ctrl-C does not end it first.
_PROGRAM = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
groups = []
for line in sys.stdin:
    if line.strip() == "done":
        sys.exit(0)
    groups.append(int(line))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class Guard:
    """Context manager; `watch` each rank's process group."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def watch(self, group: int) -> None:
        """End this process group if we die."""
        self._tell(str(group))

    def close(self) -> None:
        """All ranks have ended: nothing is left to guard."""
        self._tell("done")
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _tell(self, line: str) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
