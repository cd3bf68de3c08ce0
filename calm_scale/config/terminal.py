"""Text for a terminal: any locale's encoding, and readers that have gone."""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys

_PLAIN = {
    "·": "-", "–": "-", "—": "-", "…": "...", "→": "->", "←": "<-", "×": "x", "≤": "<=", "≥": ">=", "≈": "~",
    "Σ": "Sum ", "α": "alpha", "σ": "sigma", "§": "section ", "\u202f": " ", "\u00a0": " ", "█": "#", "━": "-",
    "│": "|", "─": "-", "•": "*", "“": '"', "”": '"', "’": "'", "−": "-", "±": "+/-", "⌈": "ceil(", "⌉": ")",
}  # fmt: skip
_ERRORS = "calm_scale_plain"
_GONE = (errno.EPIPE, errno.EBADF)


def survive_any_output() -> None:
    """Let stdout and stderr of this process take every text, and outlive their readers.

    A character that the locale's encoding lacks is written as a plain one or as an escape. What is written to a closed
    stream, or to a pipe whose reader has ended, is dropped: it does not change the exit code of work that succeeded.
    A descriptor that was closed from the start is taken by ``/dev/null``, or the next file opened would get its number.
    """
    _fill_closed_descriptors()
    codecs.register_error(_ERRORS, _in_plain_characters)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _lasting(sys.stdout, 1)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _lasting(sys.stderr, 2)


def reader_has_gone() -> bool:
    """Whether stdout was dropped, so that a command without an end may end."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(raw, _Lasting) and raw.dropped


def _fill_closed_descriptors() -> None:
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number


class _Lasting(io.FileIO):
    """A descriptor whose writes are dropped once nobody can read them; those of stderr after any failure."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.dropped = False

    def write(self, data: object) -> int:
        size = len(memoryview(data).cast("B"))  # type: ignore[arg-type]
        if self.dropped:
            return size
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            if error.errno not in _GONE and self.fileno() != 2:
                raise
            self.dropped = True
            return size


def _lasting(stream: object, descriptor: int) -> io.TextIOWrapper:
    """The stream of a descriptor, in the encoding that ``stream`` had."""
    if isinstance(stream, io.TextIOWrapper):
        stream.flush()
    encoding = getattr(stream, "encoding", None) or "utf-8"
    terminal = os.isatty(descriptor)
    return io.TextIOWrapper(
        io.BufferedWriter(_Lasting(descriptor)),
        encoding=encoding,
        errors=_ERRORS,
        line_buffering=terminal or descriptor == 2,
        write_through=False,
    )


def _in_plain_characters(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_plain, error.object[error.start : error.end])), error.end


def _plain(letter: str) -> str:
    return _PLAIN.get(letter) or letter.encode("ascii", "backslashreplace").decode()
