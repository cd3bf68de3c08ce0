"""`calm-scale flops` and `plan`: numbers before anything runs. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from calm_scale.cli.options import ConfigFile, JsonFile, Overrides, amount, output_file, user_path
from calm_scale.config import load
from calm_scale.config.files import refuse_same_file


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command(epilog="Example: calm-scale flops configs/lm/calm-xl.yaml --html flops.html")(flops)
    app.command(epilog="Example: calm-scale plan configs/runs/calm-xl.yaml --nodes 1..64 --gpu h100")(plan)


def flops(
    targets: Annotated[
        list[Path],
        typer.Argument(
            metavar="CONFIG|RUN...",
            help="Configurations or run folders.",
            show_default=False,
            parser=user_path,
        ),
    ],
    set_: Overrides = None,
    html: Annotated[Path | None, output_file("--html", "Write one self-contained HTML file.")] = None,
    json: JsonFile = None,
    count: Annotated[
        bool, typer.Option("--count", help="Check against torch's FLOP counter on a tiny twin.")
    ] = False,
    price: Annotated[float | None, amount("--price", "Dollars per device-hour.")] = None,
    watts: Annotated[float | None, amount("--watts", "Watts per device, for kWh.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown instead of tables.")] = False,
    short: Annotated[
        bool, typer.Option("--short", help="Print only what runs did; the files get the whole report.")
    ] = False,
) -> None:
    """FLOPs by component, token and run, beside the paper's Table 1; for a run folder also what was done and wasted."""
    from calm_scale.accounting.report.run_sections import Prices
    from calm_scale.stages.plan.costs import report

    refuse_same_file({"--html": html, "--json": json}, {str(target): target for target in targets})
    prices = Prices(dollars_per_device_hour=price, watts_per_device=watts)
    raise typer.Exit(
        report(
            targets,
            set_ or [],
            html_file=html,
            json_file=json,
            markdown=markdown,
            short=short,
            count=count,
            prices=prices,
        )
    )


def plan(
    config: ConfigFile,
    set_: Overrides = None,
    nodes: Annotated[
        str, typer.Option("--nodes", metavar="N|A,B|A..B", help="Nodes; a range tries its powers of two.")
    ] = "1",
    gpus_per_node: Annotated[
        int, typer.Option("--gpus-per-node", min=1, max=1024, help="GPUs on a node.")
    ] = 8,
    gpu: Annotated[str, typer.Option("--gpu", help="a100, h100, h200, b200, mi300x.")] = "h100",
    price: Annotated[float | None, amount("--price", "Dollars per GPU-hour.")] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            "--calibrate",
            metavar="FILE",
            help="Figures of this GPU, written by benchmarks/gpu.py --json.",
            parser=user_path,
        ),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Layouts ranked, for one or more numbers of nodes: memory, bubble, step, days, cost; and the one to take."""
    from calm_scale.stages.plan.costs import print_plan

    refuse_same_file({"--json": json}, {"CONFIG": config, "--calibrate": calibrate})
    resolved = load(config, set_ or ())
    raise typer.Exit(
        print_plan(
            resolved,
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            gpu=gpu,
            price=price,
            calibration=calibrate,
            json_file=json,
        )
    )
