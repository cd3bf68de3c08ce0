"""Being asked to stop. The signal only sets a flag; the loop agrees with all ranks on the step to stop after.

Install this before the heavy imports: until then a signal ends the process. Imports no torch.
"""

from __future__ import annotations

import atexit
import contextlib
import signal
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
IMPATIENT = 3
"""That many Ctrl-C end the process without a checkpoint."""


def ignore_stop_signals() -> None:
    """For a process that has nothing left to do but to end: its exit code stands."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopSignals:
    """Remembers the first stop signal. Later ones change nothing, except a third Ctrl-C.

    Use as a context manager, or call ``install`` and ``restore``. Installing again (after a library put its own
    handlers there) is fine. Without ``restore`` they stay until the process is gone: Python gives signals their
    default effect back while it shuts down, so a second SIGTERM would turn exit code 75 into 143.
    """

    def __init__(self) -> None:
        self.received: int = 0
        self._interrupts = 0
        self._before: dict[int, Any] = {}

    @property
    def name(self) -> str:
        """``SIGTERM``, …, or empty."""
        return signal.Signals(self.received).name if self.received else ""

    def install(self) -> StopSignals:
        """Takes the signals over. Main thread only."""
        for number in STOP_SIGNALS:
            before = signal.signal(number, self._handle)
            if before != self._handle:
                self._before.setdefault(number, before)
        atexit.unregister(ignore_stop_signals)
        atexit.register(ignore_stop_signals)
        return self

    def restore(self) -> None:
        """Gives the signals back to whoever had them."""
        atexit.unregister(ignore_stop_signals)
        for number, handler in self._before.items():
            with contextlib.suppress(ValueError, TypeError):
                signal.signal(number, handler)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts >= IMPATIENT:
                raise KeyboardInterrupt

    def __enter__(self) -> StopSignals:
        return self.install()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()
