"""A write that goes on in a thread while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundWrite:
    """Runs ``write`` once, at once, in a thread of its own; its error is raised by ``wait``."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint-write")
        self._thread.start()

    def done(self) -> bool:
        """The write has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Blocks until the write has ended; raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:  # handed to whoever waits
            self._error = error
