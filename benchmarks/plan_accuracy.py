"""The plan's step times beside measured ones: published runs of dense Transformers on A100 and H100 clusters.

    python benchmarks/plan_accuracy.py                 # figures: fitted families, held-out families, all
    python benchmarks/plan_accuracy.py --rows          # every row, predicted over measured, and where its step goes
    python benchmarks/plan_accuracy.py --cross         # each family by constants fitted to the others alone
    python benchmarks/plan_accuracy.py --fit           # the constants, fitted again to the training families
    python benchmarks/plan_accuracy.py --data mine.csv --picture scatter.png

Each row becomes a run document of the autoregressive baseline (same layers, widths, layout, batch) and goes through
the function that `calm-scale plan` uses. Passed over: rows that shard weights over the data-parallel ranks (FSDP),
that are not bf16, or whose layout is not fully known. Context parallelism, which calm-scale does not have, counts as
data parallelism.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from itertools import combinations
from math import ceil, nan
from pathlib import Path
from statistics import median

from _plan_fit import fit, predict
from _published import DATA, PROGRAMS, TRAINING_FAMILIES, Row, read_rows


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--cross", action="store_true")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--picture", type=Path)
    asked = parser.parse_args()
    rows = read_rows(asked.data)
    predicted = {row.id: row.predict().total for row in rows}
    if asked.rows:
        show_rows(rows)
    if asked.fit:
        for name, value in fit([row for row in rows if row.family in TRAINING_FAMILIES], PROGRAMS).items():
            print(f"{name}: {value:.3g}")
    for name, chosen in (
        ("fitted", [row for row in rows if row.family in TRAINING_FAMILIES]),
        ("held_out", [row for row in rows if row.family not in TRAINING_FAMILIES]),
        ("all", rows),
    ):
        show_figures(name, chosen, predicted)
    if asked.cross:
        show_figures("cross", rows, cross_validate(rows))
    if asked.picture:
        draw(rows, predicted, asked.picture)
    return 0


def cross_validate(rows: list[Row]) -> dict[str, float]:
    """Seconds of every row, by constants fitted to all families but its own."""
    found: dict[str, float] = {}
    for family in sorted({row.family for row in rows}):
        constants = fit([row for row in rows if row.family != family], PROGRAMS)
        found |= {row.id: predict(row, constants, PROGRAMS) for row in rows if row.family == family}
    return found


def figures(rows: Iterable[Row], predicted: Mapping[str, float]) -> dict[str, float]:
    """Errors are |predicted / measured − 1|; pairs are of one family and differ by more than 3 %."""
    rows = list(rows)
    errors = sorted(abs(predicted[row.id] / row.measured - 1) for row in rows)
    pairs = [
        (a, b)
        for a, b in combinations(rows, 2)
        if a.family == b.family and abs(a.measured / b.measured - 1) > 0.03
    ]
    right = sum((predicted[a.id] < predicted[b.id]) == (a.measured < b.measured) for a, b in pairs)
    return {
        "rows": len(errors),
        "mfu_error_median": median(errors),
        "mfu_error_p90": errors[max(0, ceil(0.9 * len(errors)) - 1)],
        "pairs": len(pairs),
        "ranking": right / len(pairs) if pairs else nan,
    }


def show_figures(name: str, rows: list[Row], predicted: Mapping[str, float]) -> None:
    """One line a figure."""
    for key, value in figures(rows, predicted).items():
        print(f"plan_{key}_{name}: {value:.3g}")


def draw(rows: list[Row], predicted: Mapping[str, float], path: Path) -> None:
    """Predicted over measured against the measured step, one mark a source; filled where its family was fitted."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for index, source in enumerate(PROGRAMS):
        for fitted in (True, False):
            chosen = [r for r in rows if r.source == source and (r.family in TRAINING_FAMILIES) == fitted]
            axes.plot(
                [row.measured for row in chosen],
                [predicted[row.id] / row.measured for row in chosen],
                "os^D"[index],
                color=f"C{index}",
                fillstyle="full" if fitted else "none",
                label=f"{PROGRAMS[source].name}, {'fitted' if fitted else 'held out'}",
            )
    axes.axhspan(0.75, 1.25, color="0.93", zorder=0)
    axes.axhline(1, color="0.6", linewidth=0.8)
    axes.set(xscale="log", xlabel="measured step, s", ylabel="predicted / measured", ylim=(0, 1.6))
    axes.legend(fontsize=7, ncols=2, loc="lower right")
    figure.savefig(path, dpi=130)


def show_rows(rows: list[Row]) -> None:
    """Every row: predicted over measured, and the parts of the prediction."""
    for row in rows:
        time = row.predict()
        parallel = row.config.lm.parallel
        layout = (
            f"tp{parallel.tensor} pp{parallel.pipeline}x{parallel.virtual_pipeline} dp{row.data_parallel}"
        )
        parts = " ".join(f"{name} {100 * seconds / time.total:.0f}%" for name, seconds in time.parts.items())
        print(
            f"{row.id} {row.family:18} {row.gpus:4} {layout:18} mb{row.config.lm.training.micro_batch} "
            f"measured {row.measured:8.3f} predicted/measured {time.total / row.measured:5.2f}  {parts}"
        )


if __name__ == "__main__":
    sys.exit(main())
