"""The container of a cluster profile, and which paths of this machine it shows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import model_validator

from calm_scale.config.base import Section
from calm_scale.config.values import LinePath

Runtime = Literal["pyxis", "apptainer"]
_FORM = "write SOURCE:TARGET or SOURCE:TARGET:FLAGS with absolute paths, such as /shared/data:/shared/data:ro"
_WITHOUT_SOURCE = ("tmpfs", "umount")
"""What pyxis takes in place of a source: nothing of the machine is seen at the target."""


@dataclass(frozen=True)
class Mount:
    """``source`` on the machine is seen as ``target`` in the container; None: something else is seen there."""

    source: Path | None
    target: Path


class ContainerConfig(Section):
    """A container runtime for the job steps.

    ``mounts``: ``SOURCE:TARGET[:FLAGS]`` each. The folder of the submission and the run folders are mounted anyway.
    """

    runtime: Runtime
    image: LinePath
    mounts: tuple[LinePath, ...] = ()

    @model_validator(mode="after")
    def _readable(self) -> ContainerConfig:
        for text in self.mounts:
            read_mount(text, self.runtime)
        return self


def read_mount(text: str, runtime: Runtime) -> Mount:
    """A mount as the runtime reads it.

    Raises:
        ValueError: the runtime would read something else, or nothing.
    """
    parts = text.split(":")
    source, target = parts[0], parts[1] if len(parts) > 1 else parts[0]
    bare = runtime == "pyxis" and source in _WITHOUT_SOURCE
    if len(parts) > 3 or not target.startswith("/") or not (bare or source.startswith("/")):
        raise ValueError(f"mount {text!r}: {_FORM}")
    if Path(target) == Path("/"):
        raise ValueError(f"mount {text!r}: nothing can be mounted over the container's root; {_FORM}")
    if found := unmountable(text, runtime):
        raise ValueError(f"mount {text!r}: {runtime} cannot mount a path with {found}; {_FORM}")
    return Mount(None if bare else Path(source), Path(target))


def unmountable(path: str, runtime: Runtime) -> str:
    """The characters of a path that the runtime takes for something else, between spaces; empty when there are none."""
    # pyxis hands its mounts to a shell and from there to a table of words
    unsafe = ', \t"$`\\' if runtime == "pyxis" else ","
    return " ".join(repr(char) for char in sorted({char for char in path if char in unsafe}))


def hidden(path: Path, mounts: Sequence[Mount]) -> Path | None:
    """What has to be mounted so that ``path`` means the same in the container; None when nothing is missing.

    That is ``path`` itself, or where a symbolic link on it leads. Of mounts on one place the last is seen.

    Args:
        path: absolute; need not exist.
    """
    covering = [mount for mount in mounts if path.is_relative_to(mount.target)]
    if not covering or covering[-1].source is None:
        return path
    source, target = covering[-1].source, covering[-1].target
    real = Path(os.path.realpath(path))
    if Path(os.path.realpath(source / path.relative_to(target))) != real:
        return path
    if real.is_relative_to(os.path.realpath(source)):
        return None
    return path if real == path else hidden(real, mounts)
