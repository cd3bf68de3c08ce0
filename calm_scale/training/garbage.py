"""Python's cyclic garbage collector under the loop's control.

Left alone, the interpreter collects at a moment that differs from rank to rank, stops its rank for up to some tenths of
a second, and every other rank waits for it in the next collective.
"""

from __future__ import annotations

import gc
from types import TracebackType


class GarbageCollection:
    """While it is entered, garbage is collected after every ``interval`` steps only: on all ranks at the same steps.

    What exists at the beginning (modules, the model, its optimizer) is collected once and never looked at again, so
    that a later collection takes milliseconds. With ``interval`` 0 the interpreter collects as it does everywhere.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._was_enabled = False

    def __enter__(self) -> GarbageCollection:
        if self._interval:
            self._was_enabled = gc.isenabled()
            gc.disable()
            gc.collect()
            gc.freeze()
        return self

    def after(self, step: int) -> None:
        """Collects, if a collection is due after this step."""
        if self._interval and step % self._interval == 0:
            gc.collect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._interval:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()
