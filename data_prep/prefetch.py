"""Work ahead in threads: the next items are made while the present one is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import repeat, takewhile
from typing import Any, TypeVar

T = TypeVar("T")
_END: Any = object()


def prefetch(jobs: Iterable[Callable[[], T]], workers: int, depth: int) -> Generator[T, None, None]:
    """The results of ``jobs`` in their order, made by ``workers`` threads, at most ``depth`` ahead of the caller.

    Close the generator when you stop early. It waits for the jobs under way, so that no thread of it is left; without
    that the interpreter waits for them when it ends.

    Raises:
        BaseException: what a job raised, in the place of its result. Nothing follows it.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix="prefetch")
    pending: deque[Future[T]] = deque()
    try:
        for job in jobs:
            pending.append(pool.submit(job))
            if len(pending) > depth:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def read_ahead(items: Iterator[T], depth: int = 1) -> Generator[T, None, None]:
    """The items of an iterator that runs in one thread, at most ``depth`` ahead; otherwise as ``prefetch``."""
    with closing(prefetch(repeat(partial(next, items, _END)), workers=1, depth=depth)) as ahead:
        yield from takewhile(lambda item: item is not _END, ahead)
