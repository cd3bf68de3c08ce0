"""Compressed SLURM host lists (``n[01-04,7],login``) to names, by scontrol or by ourselves."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import product

from launchers.errors import LaunchError

_SCONTROL_SECONDS = 10
_RANGE = re.compile(r"(\d+)(?:-(\d+))?\Z")
_NAME = re.compile(r"[A-Za-z0-9._-]*\Z")


def expand(host_list: str) -> list[str]:
    """Every host of a compressed list, in order.

    ``scontrol show hostnames`` answers where it can (it needs a SLURM configuration); `expand_here` is the
    fallback and gives the same answer.

    Raises:
        LaunchError: the list is empty or malformed.
    """
    if not host_list.strip():
        raise LaunchError(
            "the host list is empty: SLURM_JOB_NODELIST is unset or blank; run inside a job step"
        )
    return _by_scontrol(host_list) or expand_here(host_list)


def expand_here(host_list: str) -> list[str]:
    """`expand` without scontrol: any number of brackets per name, zero padding kept, rightmost runs fastest."""
    hosts = [
        host for entry in _split(host_list.strip(), host_list) for host in _expand_entry(entry, host_list)
    ]
    if not hosts:
        raise LaunchError(f"host list {host_list!r} names no host")
    return hosts


def first(host_list: str) -> str:
    """The first host of a compressed list: where rank 0 runs."""
    return expand(host_list)[0]


def expand_counts(counts: str) -> list[int]:
    """``2(x3),1`` → ``[2, 2, 2, 1]``: SLURM's form of tasks per node.

    Raises:
        LaunchError: the text is not of that form.
    """
    result: list[int] = []
    for entry in counts.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", entry)
        if match is None:
            raise LaunchError(f"tasks-per-node list {counts!r} is not of the form 2(x3),1")
        result += [int(match[1])] * int(match[2] or 1)
    return result


def _by_scontrol(host_list: str) -> list[str] | None:
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        return None
    try:
        answer = subprocess.run(
            [scontrol, "show", "hostnames", host_list],
            capture_output=True,
            text=True,
            timeout=_SCONTROL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.split() if answer.returncode == 0 else None


def _split(text: str, whole: str) -> list[str]:
    """Cut at the commas that stand outside brackets."""
    entries, depth, start = [], 0, 0
    for position, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise LaunchError(
                f"host list {whole!r} has brackets that do not match at character {position + 1}"
            )
        if char == "," and depth == 0:
            entries.append(text[start:position])
            start = position + 1
    if depth:
        raise LaunchError(f"host list {whole!r} has a bracket that is never closed")
    entries.append(text[start:])
    return [entry.strip() for entry in entries if entry.strip()]


def _expand_entry(entry: str, whole: str) -> list[str]:
    literals = re.split(r"\[[^\]]*\]", entry)
    for literal in literals:
        if not _NAME.match(literal):
            raise LaunchError(f"host list {whole!r}: {entry!r} is not a host name")
    choices = [_numbers(inner, whole) for inner in re.findall(r"\[([^\]]*)\]", entry)]
    return [
        "".join(part for pair in zip(literals, (*picks, ""), strict=True) for part in pair)
        for picks in product(*choices)
    ]


def _numbers(inner: str, whole: str) -> list[str]:
    numbers: list[str] = []
    for piece in inner.split(","):
        match = _RANGE.match(piece.strip())
        if match is None:
            raise LaunchError(f"host list {whole!r}: [{inner}] is not a list of numbers and ranges")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low):
            raise LaunchError(f"host list {whole!r}: the range {low}-{high} runs backwards")
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers
