"""A command run in a process that a server has forked, which has read torch, Megatron-core and our modules before."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

READ_BEFORE = ["calm_scale.cli", "calm_scale.stages.train", "calm_scale.stages.evaluate", "megatron.core"]


def run_forked(arguments: tuple[str, ...], timeout: float) -> tuple[int, str, str]:
    """Exit code, standard output and error output of ``calm-scale ARGUMENTS``."""
    assert all(map(find_spec, READ_BEFORE)), "the server would not say that it cannot find one"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(READ_BEFORE)
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder) / name for name in ("out", "err")]
        process = context.Process(target=_run, args=(arguments, {**os.environ}, Path.cwd(), *streams))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
        return process.exitcode or 0, *(stream.read_text(encoding="utf-8") for stream in streams)


def _run(arguments: tuple[str, ...], environment: dict[str, str], folder: Path, out: Path, err: Path) -> None:
    from calm_scale.cli import main

    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["calm-scale", *arguments]
    main()
