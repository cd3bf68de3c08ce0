"""Work in a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Background:
    """Runs ``work`` once, at once, in a thread of its own; ``wait`` gives its result or raises its error."""

    def __init__(self, work: Callable[[], Any], name: str = "checkpoint") -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name=name)
        self._thread.start()

    def done(self) -> bool:
        """Finished or failed."""
        return not self._thread.is_alive()

    def wait(self) -> Any:
        """The result; raises what went wrong."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self._result = work()
        except BaseException as error:  # raised again by wait()
            self._error = error
