"""`calm-scale train-ae`, `train-lm`, and `demo`, which runs them and everything around them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from calm_scale.cli.options import ConfigFile, DryRun, NumRanks, Overrides, UsedDevice, user_path, with_device
from calm_scale.config import load
from calm_scale.config.run_folder import Stage

Accept = Annotated[
    list[str] | None,
    typer.Option(
        "--accept", metavar="FIELD", help="Resume although this changed field changes results. Repeatable."
    ),
]
ResumeStep = Annotated[
    int | None,
    typer.Option(
        "--resume-step",
        metavar="STEP",
        min=0,
        help="Resume the checkpoint of this step instead of the newest, even one that is marked suspect.",
    ),
]
Profile = Annotated[
    bool,
    typer.Option(
        "--profile",
        help="Record some steps with torch's profiler: traces in the stage's folder `profile`. `training.profile` says "
        "which steps and ranks.",
    ),
]
RESUMES = (
    "Run it again after any stop: it resumes from the newest complete checkpoint. "
    "Exit code 75 means: stopped on a signal after saving. Exit code 76 means: the loss or the gradients stayed "
    "non-finite; starting it again unchanged would repeat that."
)


_HELP = {
    Stage.AUTOENCODER: "Train the patch autoencoder under DeepSpeed ZeRO, then export it.",
    Stage.LM: "Train the language model (CALM or the autoregressive baseline) on Megatron-core.",
}
_EXAMPLES = {
    Stage.AUTOENCODER: "calm-scale train-ae configs/runs/calm-xl.yaml --nproc 8",
    Stage.LM: "calm-scale train-lm configs/runs/calm-xl.yaml --set lm.parallel.pipeline=4",
}


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    for name, stage in (("train-ae", Stage.AUTOENCODER), ("train-lm", Stage.LM)):
        epilog = f"Example: {_EXAMPLES[stage]}. {RESUMES}"
        app.command(name, help=_HELP[stage], epilog=epilog)(_command(stage))
    app.command(epilog="Example: calm-scale demo --quick --out demo-out")(demo)


def _command(stage: Stage) -> Callable[..., None]:
    def command(
        config: ConfigFile,
        set_: Overrides = None,
        nproc: NumRanks = None,
        device: UsedDevice = None,
        accept: Accept = None,
        resume_step: ResumeStep = None,
        profile: Profile = False,
        dry_run: DryRun = False,
    ) -> None:
        from calm_scale.stages import launch

        overrides = with_device(set_, device)
        run = load(config, overrides)
        if profile and run.require_stage(stage).training.profile is None:
            run = load(config, [*overrides, f"{stage}.training.profile={{}}"])
        if dry_run:
            from calm_scale.stages.before_start import all_notes
            from calm_scale.stages.plan.dry_run import dry_run as print_dry_run

            found = all_notes(run, config, overrides, stage)
            raise typer.Exit(print_dry_run(run, stage, nproc, found, accept or []))
        code = launch.spawn_if_needed(nproc or launch.default_ranks(run, stage))
        if code is None:
            from calm_scale.stages.train import train

            code = train(run, stage, accept or [], resume_step)
        raise typer.Exit(code)

    return command


def demo(
    out: Annotated[
        Path,
        typer.Option(
            "--out", help="Folder of the demo's run; a second call starts it anew.", parser=user_path
        ),
    ] = Path("demo-out"),
    quick: Annotated[bool, typer.Option("--quick", help="The 3-minute version.")] = False,
) -> None:
    """The whole pipeline on this CPU: real text, MPI prep, ZeRO, Megatron TP 2 stopped and resumed as PP 2, scores."""
    from calm_scale.stages.demo import run_demo

    raise typer.Exit(run_demo(out, quick=quick))
