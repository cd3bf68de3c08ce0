"""`calm-scale`: the commands, and the one place where an error becomes a message and an exit code.

Exit codes: 0 done · 1 the work failed · 2 a mistake in what was asked (configuration, arguments) ·
75 stopped on a signal after saving; run the same command again to go on · 76 the training's numbers are no longer
finite; needs a person · 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings

import typer

from calm_scale import __version__
from calm_scale.cli import accounting, checkpoints, cluster, configuration, data, scoring, train
from calm_scale.config import CalmScaleError
from calm_scale.config.terminal import survive_any_output
from launchers.errors import tell_job_script

app = typer.Typer(
    name="calm-scale",
    help="Pretrain Continuous Autoregressive Language Models: text → shards → autoencoder → CALM → scores.",
    epilog="Start with `calm-scale demo --quick --out demo-out`, or `calm-scale plan configs/runs/calm-xl.yaml`.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"calm-scale {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Options before the command."""


for room in (data, train, scoring, accounting, cluster, checkpoints, configuration):
    room.register(app)


def main() -> None:
    """Run a command; errors of the user and of files print one message, never a traceback."""
    for told_elsewhere in ("Transformer Engine and Apex are not installed", "torch.distributed is disabled"):
        warnings.filterwarnings("ignore", message=f".*{told_elsewhere}")
    _write_plainly_under_mpirun()
    survive_any_output()
    try:
        app()
    except CalmScaleError as error:
        _complain(error)
        tell_job_script(error)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            place = f"{error.filename}: " if error.filename else ""
            _complain(
                CalmScaleError(f"{place}no space left on the disk; free some and run the command again")
            )
            sys.exit(1)
        if error.filename is None:
            raise
        _complain(CalmScaleError(f"{error.filename2 or error.filename}: {error.strerror}"))
        sys.exit(1)
    except SystemExit as stop:
        if stop.code == 130:  # what typer makes of Ctrl-C, without a word
            sys.stderr.write("calm-scale: interrupted\n")
        raise


def _write_plainly_under_mpirun() -> None:
    """mpirun gives its ranks a terminal of its own, whatever its output really goes to: a log must not hold colours."""
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        os.environ.setdefault("TTY_COMPATIBLE", "0")  # rich's word for it


def _complain(error: CalmScaleError) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True)
    console.print(Text("error: ", style="bold red") + Text(str(error)))
