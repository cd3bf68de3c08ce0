"""Kills a small run again and again and shows that it ends as if nothing had happened.

The real commands (``calm-scale train-lm`` with TP 2, ``train-ae`` with ZeRO 2, two gloo ranks each) are ended by
SIGKILL at random moments, at least a third of them in the middle of a save, all ranks or one, and started again.
At the end parameters, Adam moments and metrics are compared bit for bit with a run that was never touched.

    python benchmarks/chaos.py --stage lm --kills 20
    python benchmarks/chaos.py --stage autoencoder --kills 10
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from calm_scale.checkpoint.judge import inventory
from calm_scale.config.run_folder import StageFolder
from calm_scale.record.metrics import read_metrics

INTERVAL = 5
NUM_RANKS = 2
TIMES = {"seconds", "cpu_seconds", "tokens_per_s", "time", "attempt"}
COMMAND = {"lm": "train-lm", "autoencoder": "train-ae"}
PATIENCE = 900.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", choices=sorted(COMMAND), default="lm")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=None, help="default: enough for all kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--async-save", action="store_true", help="saves in the background")
    options = parser.parse_args()
    steps = options.steps or INTERVAL * (2 * options.kills + 2)
    with tempfile.TemporaryDirectory(prefix="calm-chaos-") as scratch:
        document = prepare(Path(scratch), steps, options.async_save, with_autoencoder=options.stage == "lm")
        untouched = Run(document, options.stage, Path(scratch) / "untouched")
        untouched.finish()
        chaos = Run(document, options.stage, Path(scratch) / "chaos")
        tally = torment(chaos, options.kills, steps, random.Random(options.seed))
        chaos.finish()
        return report(options.stage, tally, compare(untouched, chaos, steps))


@dataclass
class Run:
    """One run folder and its command."""

    document: Path
    stage: str
    workdir: Path
    process: subprocess.Popen[bytes] | None = None
    wrecks: set[int] = field(default_factory=set)

    @property
    def folder(self) -> Path:
        return self.workdir / self.stage

    def start(self) -> None:
        # Of lower priority than this process, which must see a save begin on a machine with no core to spare.
        command = ["nice", "-n", "10", sys.executable, "-m", "calm_scale", COMMAND[self.stage]]
        command.append(str(self.document))
        command += ["--set", f"workdir={self.workdir}"]
        self.workdir.mkdir(parents=True, exist_ok=True)
        self.wrecks = self.unfinished()
        with (self.workdir / "log.txt").open("ab") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def finish(self) -> None:
        """Starts and lets it run to its end."""
        self.start()
        code = self.wait()
        if code:
            log = (self.workdir / "log.txt").read_text(errors="replace")
            raise RuntimeError(f"{self.workdir.name} ended with {code}:\n{log[-4000:]}")

    def wait(self) -> int:
        if self.process is None:
            raise RuntimeError("not started")
        return self.process.wait(PATIENCE)

    def ranks(self) -> list[int]:
        """Process ids of the ranks, children of the launcher."""
        if self.process is None:
            return []
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        named = [(int(pid), Path(f"/proc/{pid}/cmdline")) for pid in listed]
        ranks = [pid for pid, words in named if words.exists() and b"calm_scale" in words.read_bytes()]
        return ranks if len(ranks) == NUM_RANKS else []

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            ended = self.process is None or self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                log = (self.workdir / "log.txt").read_text(errors="replace")
                raise RuntimeError(f"{'ended early' if ended else 'no progress'}:\n{log[-4000:]}")
            time.sleep(0.002)

    def step(self) -> int:
        rows = read_metrics(StageFolder(self.folder).metrics)
        return int(rows[-1]["step"]) if rows else 0

    def saved(self) -> int:
        return max(
            (e.step for e in inventory(StageFolder(self.folder).checkpoints) if e.state == "complete"),
            default=0,
        )

    def saving(self) -> bool:
        """A save of the present life is under way (a wreck of an earlier one does not count)."""
        return bool(self.unfinished() - self.wrecks)

    def unfinished(self) -> set[int]:
        found = set()
        for path in StageFolder(self.folder).checkpoints.glob("step_*.tmp"):
            with contextlib.suppress(FileNotFoundError):
                found.add(path.stat().st_ino)
        return found


@dataclass
class Tally:
    """What was done to the run."""

    kills: int = 0
    in_save: int = 0
    one_rank: int = 0
    max_steps_lost: int = 0
    lost: list[int] = field(default_factory=list)


def torment(run: Run, kills: int, steps: int, chance: random.Random) -> Tally:
    """Starts and kills; half of the kills fall into a save."""
    tally = Tally()
    for number in range(kills):
        run.start()
        base = run.saved()
        if tally.in_save * 2 <= number:  # aim at a save again when one was missed
            run.until(lambda: bool(run.ranks()))
            ranks = run.ranks()
            run.until(run.saving)
            time.sleep(chance.random() * 0.05)
        else:
            run.until(lambda base=base: run.saved() > base)
            further = run.saved() + chance.randint(1, INTERVAL - 1)
            ranks = run.ranks()
            run.until(lambda further=further: run.step() >= further)
            time.sleep(chance.random() * 0.05)
        kill(run, ranks, all_ranks=chance.random() < 0.5, tally=tally)
        tally.kills += 1
        tally.in_save += run.saving()
        tally.lost.append(run.step() - run.saved())
        tally.max_steps_lost = max(tally.lost)
        what = "in a save" if run.saving() else "between saves"
        print(
            f"kill {number + 1}/{kills}: step {run.step()}, saved {run.saved()}, {what}",
            file=sys.stderr,
            flush=True,
        )
    return tally


def kill(run: Run, ranks: list[int], all_ranks: bool, tally: Tally) -> None:
    """SIGKILL to every rank and the launcher, or to one rank (the launcher then ends the other)."""
    victims = ranks if all_ranks else ranks[-1:] if tally.kills % 2 else ranks[:1]
    tally.one_rank += not all_ranks
    if all_ranks and run.process is not None:
        run.process.kill()
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.wait()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.01)


def compare(untouched: Run, chaos: Run, steps: int) -> dict[str, bool]:
    """Parameters, moments and counters of the last checkpoint, and every row of the record."""
    import torch

    states = [
        state_of(StageFolder(run.folder).checkpoints / f"step_{steps:08d}" / "shards")
        for run in (untouched, chaos)
    ]
    names = states[0].keys() == states[1].keys() and len(states[0]) > 0
    equal = names and all(_same(states[0][name], states[1][name], torch) for name in states[0])
    return {"state": bool(equal), "metrics": record(untouched.folder) == record(chaos.folder)}


def state_of(shards: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint by name."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    files = sorted(shards.rglob("*.safetensors"))
    if files:
        return {f"{file.name}/{name}": value for file in files for name, value in load_file(file).items()}
    import torch

    reader = dcp.FileSystemReader(shards)
    listed = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        for name, entry in listed.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def _same(left: Any, right: Any, torch: Any) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and bool(torch.equal(left, right))


def record(folder: Path) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in row.items() if k not in TIMES} for row in read_metrics(StageFolder(folder).metrics)
    ]


def report(stage: str, tally: Tally, equal: dict[str, bool]) -> int:
    short = {"lm": "lm", "autoencoder": "ae"}[stage]
    bitwise = all(equal.values())
    print(f"chaos_{short}_kills: {tally.kills}")
    print(f"chaos_{short}_kills_in_save: {tally.in_save}")
    print(f"chaos_{short}_kills_of_one_rank: {tally.one_rank}")
    print(f"chaos_{short}_max_steps_lost: {tally.max_steps_lost}")
    print(f"chaos_{short}_interval: {INTERVAL}")
    print(f"chaos_{short}_bitwise: {int(bitwise)}")
    if not bitwise:
        print(f"differs: {', '.join(name for name, same in equal.items() if not same)}", file=sys.stderr)
    return 0 if bitwise and tally.max_steps_lost <= INTERVAL else 1


def prepare(scratch: Path, steps: int, async_save: bool, with_autoencoder: bool) -> Path:
    """Corpus, tokenizer, shards, and for the language model a few steps of autoencoder; returns the document."""
    from calm_scale.stages.demo.corpus import write_demo_corpus
    from data_prep.tokenizer.definition import train_bpe

    files = write_demo_corpus(scratch / "corpus", num_files=2, target_bytes=300_000, documentation_only=True)
    tokenizer = train_bpe(files, 512, scratch / "tokenizer.json")
    training = {
        "steps": steps,
        "global_batch": 4,
        "micro_batch": 2,
        "precision": "fp32",
        "optimizer": {"lr": 2e-3, "schedule": {"warmup_steps": 2}},
        "eval_interval": 7,
        "eval_samples": 4,
        "checkpoint": {"interval": INTERVAL, "keep_last": 2, "async_save": async_save},
    }
    document = {
        "name": "chaos",
        "vocab_size": 512,
        "patch_size": 2,
        "workdir": str(scratch / "shared"),
        "data": str(scratch / "shared" / "data"),
        "tokenizer": {"path": str(tokenizer)},
        "prep": {
            "splits": {"heldout": 0.1},
            "sequence_length": 64,
            "alignment": 8,
            "sources": [{"paths": [str(scratch / "corpus" / "*.jsonl.zst")]}],
        },
        "autoencoder": {
            "patches": 32,
            "model": {"latent_size": 8, "hidden_size": 32, "ffn_size": 64},
            "training": training | {"global_batch": 32},  # steps long enough to be killed between saves
            "zero": {"stage": 2, "data": 2},
        },
        "lm": {
            "backbone": {"num_layers": 2, "hidden_size": 32, "ffn_size": 64, "num_heads": 2, "positions": 32},
            "head": {"kind": "energy", "num_samples": 4, "num_posterior": 8},
            "parallel": {"tensor": 2},
            "autoencoder": str(scratch / "shared" / "autoencoder" / "export"),
            "training": training,
        },
        "logging": {"wandb": "disabled", "pictures": False, "progress": False, "interval": 1},
    }
    path = scratch / "chaos.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    _command("prep", str(path))
    if with_autoencoder:
        few = [f"autoencoder.training.steps={INTERVAL}", "autoencoder.training.checkpoint.async_save=false"]
        _command("train-ae", str(path), *(part for setting in few for part in ("--set", setting)))
    return path


def _command(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "calm_scale", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"{arguments} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        )


if __name__ == "__main__":
    sys.exit(main())
