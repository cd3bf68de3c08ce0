"""Work one step ahead: the next item is made while the last one is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
_POLL_SECONDS = 0.1


class Ahead(Generic[T]):
    """Iterates ``items`` in a thread, at most ``depth`` ahead. An error of the iterator is raised in its place.

    >>> with Ahead(blocks) as ready:
    ...     for block in ready: ...
    """

    def __init__(self, items: Iterator[T], depth: int = 1) -> None:
        self._items = items
        self._queue: queue.Queue[tuple[T | None, BaseException | None, bool]] = queue.Queue(depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._produce, daemon=True)

    def __enter__(self) -> Iterator[T]:
        self._thread.start()
        return self._consume()

    def __exit__(self, *_: object) -> None:
        """Stop the thread, wherever it is, and wait for it."""
        self._stopped.set()
        self._thread.join()

    def _consume(self) -> Iterator[T]:
        while True:
            item, error, ended = self._queue.get()
            if error is not None:
                raise error
            if ended:
                return
            yield item  # type: ignore[misc]

    def _produce(self) -> None:
        try:
            for item in self._items:
                if not self._put((item, None, False)):
                    return
        except BaseException as error:  # handed over, not handled
            self._put((None, error, False))
            return
        self._put((None, None, True))

    def _put(self, entry: tuple[T | None, BaseException | None, bool]) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(entry, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False
