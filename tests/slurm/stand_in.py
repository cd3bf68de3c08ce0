"""Stands in for `python -m calm_scale STAGE CONFIG`: the same exit codes, signals and folders, no training.

What it does is told by ``<workdir>/behaviour.json``: per stage ``steps``, ``seconds`` per step, ``save_seconds``,
``interval`` between checkpoints, ``crash_at`` a step with ``code`` (on the last rank), ``crash_once``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import yaml

from calm_scale.config import RunConfig, load
from launchers.environment import facts

STAGES = {"prep": "prep", "train-ae": "autoencoder", "train-lm": "lm", "eval": "eval"}


def main() -> int:
    told: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _: told.append(number))
    stage = STAGES[sys.argv[1]]
    workdir = Path(yaml.safe_load(Path(sys.argv[2]).read_text())["workdir"])
    settings = json.loads((workdir / "behaviour.json").read_text()).get(stage, {})
    me = facts()
    attempt = os.environ.get("CALM_SCALE_ATTEMPT", "?")
    ranks = workdir / stage / "ranks"
    ranks.mkdir(parents=True, exist_ok=True)
    card = ranks / f".{attempt}.{me.rank}"
    card.write_text(json.dumps({"pid": os.getpid(), "port": me.master_port, "size": me.world_size}))
    card.rename(ranks / f"attempt_{attempt}.rank_{me.rank}")
    print(f"rank {me.rank} of {me.world_size}, attempt {attempt}", flush=True)
    if stage in ("prep", "eval"):
        folder = workdir / ("data" if stage == "prep" else "eval")
        folder.mkdir(exist_ok=True)
        (folder / f"part-{me.rank}{sys.argv[4] if len(sys.argv) > 4 else ''}").write_text(attempt)
        return int(settings.get("code", 0))
    return train(workdir / stage, settings, me.rank, me.world_size, told)


def train(folder: Path, settings: dict[str, float], rank: int, size: int, told: list[int]) -> int:
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    meeting = folder / f"meeting_{os.environ.get('CALM_SCALE_ATTEMPT', '0')}"
    meeting.mkdir(exist_ok=True)
    last = int(settings.get("steps", 3))
    step = max((int(path.name[5:]) for path in checkpoints.glob("step_????????")), default=0)
    while step < last:
        time.sleep(settings.get("seconds", 0.1))
        step += 1
        if step == settings.get("crash_at") and rank == size - 1 and not (folder / "crashed").exists():
            if settings.get("crash_once"):
                (folder / "crashed").touch()
            print("deliberate: the last rank fails here", file=sys.stderr, flush=True)
            return int(settings.get("code", 1))
        deaf = int(os.environ.get("CALM_SCALE_ATTEMPT", "0")) < settings.get("deaf_until_attempt", 0)
        stopping = meet(meeting, step, rank, size, bool(told) and not deaf)
        if stopping or step % settings.get("interval", 1000) == 0 or step == last:
            save(checkpoints, step, settings, rank)
            if stopping and step < last:
                return 75
    return 0


def meet(folder: Path, step: int, rank: int, size: int, told: bool) -> bool:
    """Stands in for a collective: waits for every rank at this step; whether any of them was told to stop."""
    (folder / f".{step}.{rank}").write_text(str(int(told)))
    (folder / f".{step}.{rank}").rename(folder / f"{step}.{rank}")
    others = [folder / f"{step}.{other}" for other in range(size)]
    while not all(path.exists() for path in others):
        time.sleep(0.02)
    return any(path.read_text() == "1" for path in others)


def save(checkpoints: Path, step: int, settings: dict[str, float], rank: int) -> None:
    time.sleep(settings.get("save_seconds", 0))
    if rank == 0 and not (checkpoints / f"step_{step:08d}").exists():
        write_checkpoint(checkpoints, step, load(Path(sys.argv[2])))


def write_checkpoint(checkpoints: Path, step: int, run: RunConfig) -> None:
    """A complete checkpoint of the run whose only file is its card: the program judges it, also at a submission."""
    from calm_scale.checkpoint.card import Card, Counters
    from calm_scale.checkpoint.file_list import FileEntry, FileList, checksum

    folder = checkpoints / f"step_{step:08d}.tmp"
    folder.mkdir(exist_ok=True)
    stage = checkpoints.parent.name
    names = {"stage": stage, "run_id": "stand-in", "config_hash": "", "tokenizer_fingerprint": ""}
    more = {"shards_fingerprint": "", "patch_size": run.patch_size, "vocab_size": run.vocab_size}
    more["config"] = run.model_dump(mode="json")
    Card(**names, **more, created=time.time(), counters=Counters(steps=step)).write(folder)
    card = folder / "card.json"
    FileList((FileEntry(card.name, card.stat().st_size, checksum(card)),)).write(folder)
    folder.rename(checkpoints / f"step_{step:08d}")


if __name__ == "__main__":
    sys.exit(main())
