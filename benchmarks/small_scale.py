"""Does it learn? Held-out Brier-n of every model of configs/small after the same CPU time, one ``name: value`` a line.

    OMP_NUM_THREADS=1 python benchmarks/small_scale.py                     # all, one after another: about an hour
    python benchmarks/small_scale.py --only energy --seed 1                # one more seed of one model
    python benchmarks/small_scale.py --report                              # only read what is there and draw

Run it in the repository's folder: text, autoencoder and runs go to runs/small, where configs/small looks for them.
Each model is trained by `calm-scale train-lm` on one thread and scored by `calm-scale eval` at each of its checkpoints.
The clock is the process CPU time of the training steps (``cpu_seconds`` in metrics.jsonl): starting up, saving and
evaluating are not in it, and other processes on the machine do not lengthen it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from calm_scale.checkpoint.judge import inventory
from calm_scale.config import RunConfig, load
from calm_scale.config.run_folder import RunFolder, Stage
from calm_scale.evaluation.sequences import selected
from calm_scale.record.metrics import read_metrics
from calm_scale.stages.splits import open_split
from data_prep.shards.reading import ShardDataset

CONFIGS = Path("configs/small")
MODELS = ("energy", "atoms", "flow", "diffusion", "baseline")
ORDERS = 4


@dataclass(frozen=True)
class Point:
    """A checkpoint: CPU seconds and tokens of training behind it, Brier-1 … 4 and their 95 % intervals."""

    step: int
    cpu_seconds: float
    tokens: int
    brier: list[float]
    intervals: list[list[float]] | None


def main() -> None:
    """Prepare, train, score, report; what is already there is not made again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=MODELS, action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--report", action="store_true", help="train nothing")
    asked = parser.parse_args()
    if not asked.report:
        prepare()
        for name in asked.only or MODELS:
            run = settings(name, asked.seed, asked.overrides)
            calm_scale("train-lm", *run)
            score(run)
    report(Path("runs/small"))


def prepare() -> None:
    """The demo's text and tokenizer, shards, and the autoencoder that all models share."""
    from calm_scale.stages.demo.corpus import write_demo_corpus
    from data_prep.tokenizer.definition import train_bpe

    base = load(CONFIGS / "base.yaml")
    if not base.tokenizer_path.exists():
        train_bpe(write_demo_corpus(base.workdir / "corpus"), base.vocab_size, base.tokenizer_path)
    if not base.autoencoder_export.exists():
        calm_scale("prep", str(CONFIGS / "base.yaml"))
        calm_scale("train-ae", str(CONFIGS / "base.yaml"))


def settings(name: str, seed: int, overrides: Sequence[str] = ()) -> list[str]:
    """The arguments that name one run: its document, and a folder of its own for another seed."""
    changes = [f"seed={seed}", f"workdir=runs/small/{name}-seed{seed}"] if seed else []
    return [str(CONFIGS / f"{name}.yaml"), *(f"--set={item}" for item in (*changes, *overrides))]


def config_of(run: Sequence[str]) -> RunConfig:
    """The run's resolved document."""
    return load(run[0], [item.removeprefix("--set=") for item in run[1:]])


def calm_scale(*arguments: str) -> None:
    """One command on one thread, shown as it is typed."""
    print("$ calm-scale", *arguments, flush=True)
    command = [sys.executable, "-m", "calm_scale", *arguments]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def score(run: Sequence[str]) -> None:
    """BrierLM of every complete checkpoint that has none yet."""
    folder = config_of(run).workdir
    for entry in inventory(folder / "lm"):
        if (
            entry.state == "complete"
            and not (RunFolder(folder).evaluations / f"step_{entry.step:08d}.json").exists()
        ):
            calm_scale("eval", *run, "--step", str(entry.step))


def points(folder: Path) -> Iterator[Point]:
    """The scored checkpoints of a run, in order. The baseline's scores are exact, the others' sampled."""
    rows = read_metrics(RunFolder(folder).stage(Stage.LM).metrics)
    spent = dict(zip((r["step"] for r in rows), accumulate(r["cpu_seconds"] for r in rows), strict=True))
    tokens = {row["step"]: row["tokens"] for row in rows}
    for path in sorted(RunFolder(folder).evaluations.glob("step_*.json")):
        step = int(path.stem.removeprefix("step_"))
        found = json.loads(path.read_text())["score"]
        exact = path.with_name(f"exact_{step:08d}.json")
        brier = json.loads(exact.read_text())["components"] if exact.exists() else found["components"]
        intervals = None if exact.exists() else found["component_intervals"]
        yield Point(step, round(spent[step], 1), tokens[step], brier, intervals)


def bigram(config: RunConfig) -> Point:
    """A bigram model counted on the whole training split, Brier-n exact: one step of mass (one unigram) smooths it."""
    started = time.process_time()
    train, heldout = (open_split(config, split, 128) for split in ("train", "heldout"))
    size = config.vocab_size
    pairs = np.zeros((size, size))
    for index in range(len(train)):
        tokens = np.asarray(train[index]).astype(np.int64)
        np.add.at(pairs, (tokens[:-1], tokens[1:]), 1)
    unigram = (pairs.sum(0) + 1) / (pairs.sum() + size)
    law = (pairs + unigram) / (pairs.sum(1, keepdims=True) + 1)
    spent = time.process_time() - started
    brier = _brier_of_chain(law, heldout, config)
    return Point(0, round(spent, 1), len(train) * 128, brier, None)


def _brier_of_chain(law: np.ndarray[Any, Any], data: ShardDataset, config: RunConfig) -> list[float]:
    """2 P(y) − Σ_x P(x)² of n tokens after each patch boundary; Σ_x P(x)² is a row sum of (law∘law)^n."""
    square, collisions = law * law, [np.ones(len(law))]
    for _ in range(ORDERS):
        collisions.append(square @ collisions[-1])
    sums, counts = np.zeros(ORDERS), np.zeros(ORDERS)
    for index in selected(len(data), config.evaluation.max_sequences):
        tokens = np.asarray(data[index]).astype(np.int64)
        for start in range(config.patch_size, len(tokens), config.patch_size):
            truth = tokens[start - 1 : start + ORDERS]
            hits = np.cumprod(law[truth[:-1], truth[1:]])
            for n, hit in enumerate(hits):
                sums[n] += 2 * hit - collisions[n + 1][truth[0]]
                counts[n] += 1
    return [float(value) for value in sums / counts]


def report(out: Path) -> None:
    """results.json, small-scale.png and the figures at the last checkpoint, for every run that is there."""
    runs = {path.parents[1].name: list(points(path.parents[1])) for path in out.glob("*/lm/metrics.jsonl")}
    order = {name: index for index, name in enumerate(MODELS)}
    runs = dict(sorted(runs.items(), key=lambda item: (order.get(item[0].split("-")[0], 9), item[0])))
    runs = {name: line for name, line in runs.items() if line}
    runs["bigram"] = [bigram(load(CONFIGS / "energy.yaml"))]
    document = {name: [asdict(point) for point in line] for name, line in runs.items()}
    (out / "results.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    draw(runs, out / "small-scale.png")
    for name, line in runs.items():
        print(f"{name}_cpu_seconds: {line[-1].cpu_seconds:.1f}")
        for n, value in enumerate(line[-1].brier, 1):
            print(f"{name}_brier_{n}: {value:.4f}")


def draw(runs: dict[str, list[Point]], path: Path) -> None:
    """Brier-1 and Brier-2 against CPU seconds; the bigram, counted in a moment, is a level line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    for order in (0, 1):
        axes: Any = figure.add_subplot(1, 2, order + 1)
        for name, line in runs.items():
            values = [point.brier[order] for point in line]
            if name == "bigram":
                axes.axhline(values[0], linestyle="--", color="gray", label=name)
                continue
            axes.plot([point.cpu_seconds for point in line], values, "o-", markersize=3, label=name)
        axes.set(title=f"Brier-{order + 1}, held out", xlabel="CPU seconds of training, one thread")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
