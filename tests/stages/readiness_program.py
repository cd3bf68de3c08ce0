"""One rank of two: a split is staged, spoilt and staged again; prints what this rank was told. Argument: RUN.yaml"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from calm_scale.config import CalmScaleError, RunConfig, load
from calm_scale.runtime.world import World, init_world
from calm_scale.stages.splits import make_ready, open_split
from data_prep.shards import staging


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def main() -> None:
    config = load(Path(sys.argv[1]))
    world = init_world(device="cpu", timeout_seconds=60)
    staged = to(config, str(config.workdir / "local"))
    shard = next(open_split(config, "train", 64).split_dir.glob("0*.shard"))

    def told(wanted: RunConfig, first: Callable[[], object] = lambda: None) -> str:
        world.barrier()  # the other rank may still be reading
        if world.is_first:
            first()
        world.barrier()
        try:
            dataset = make_ready(wanted, open_split(wanted, "train", 64), world)
        except CalmScaleError as error:
            return f"{type(error).__name__}: {error}"
        rows = sum(int(dataset[i].sum()) for i in range(len(dataset)))
        return f"{dataset.split_dir} {rows}"

    said = [told(config), told(staged), told(staged, lambda: flip(copy_of(staged, shard)))]
    said += [told(to(staged, place)) for place in ("$NO_SUCH_VARIABLE/calm", f"{config.data_dir}/local")]
    said.append(told(to(staged, f"{staged.reading.stage_to}-2"), lambda: full(world)))
    said.append(told(config, lambda: flip(shard)))
    said.append(told(to(staged, f"{staged.reading.stage_to}-2")))
    world.close()
    sys.stdout.write(json.dumps(said) + "\n")


def copy_of(config: RunConfig, shard: Path) -> Path:
    return next(Path(config.reading.stage_to).glob(f"train-*/{shard.name}"))


def to(config: RunConfig, place: str) -> RunConfig:
    return config.model_copy(update={"reading": config.reading.model_copy(update={"stage_to": place})})


def full(world: World) -> None:
    usage = staging.shutil.disk_usage
    left = [0]

    def once(path: Path) -> object:
        return SimpleNamespace(free=left.pop()) if left else usage(path)

    staging.shutil.disk_usage = once


if __name__ == "__main__":
    main()
