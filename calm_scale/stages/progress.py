"""How far a command is: a bar on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress

LINE_SECONDS = 30.0


@contextlib.contextmanager
def shown(
    title: str, console: Console, line_seconds: float = LINE_SECONDS
) -> Iterator[Callable[[int, int], None]]:
    """A function ``(done, total)`` that shows how far ``title`` is; a quiet console shows nothing."""
    if console.is_terminal and not console.quiet:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(title)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    told = time.monotonic()

    def line(done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told >= line_seconds:
            told = time.monotonic()
            console.print(f"{title}: {done:,} of {total:,}", highlight=False, markup=False)

    yield line
