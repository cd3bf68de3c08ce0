"""All-reduce over every link of the ring of nodes before a job trusts them: right sums, no link far below the rest.

Run by the job script with the tasks of the training itself (``srun … python -m calm_scale.runtime.link_check``).
Neighbouring nodes reduce a buffer together, disjoint pairs at the same time; the first rank compares. A node whose
links are all slower than half the median, or that takes part in a wrong sum on all its links, is written to
``FOLDER/bad``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from calm_scale.runtime.world import init_world
from launchers.claims import expand
from launchers.environment import RankFacts, facts

COLLECTIVE_SECONDS = 90.0
REPEATS = 3
Link = tuple[int, int]


def ring(num_nodes: int) -> list[list[Link]]:
    """Links of the ring in rounds of disjoint pairs: even, odd, and the closing one where the count is odd."""
    links = [(node, (node + 1) % num_nodes) for node in range(num_nodes)]
    if num_nodes == 2:
        return [[(0, 1)]]
    closing = [links.pop()] if num_nodes % 2 else []
    rounds = [links[0::2], links[1::2], closing]
    return [pairs for pairs in rounds if pairs]


def bad_nodes(bandwidths: Mapping[Link, float], least_share: float = 0.5) -> dict[int, str]:
    """Nodes all of whose links are slower than a share of the median (0 GB/s stands for a wrong sum).

    Between two nodes there is one link: a wrong sum blames both, a speed has nothing to be compared with.
    """
    median = statistics.median(bandwidths.values())
    nodes = sorted({node for link in bandwidths for node in link})
    bad: dict[int, str] = {}
    for node in nodes:
        mine = [speed for link, speed in bandwidths.items() if node in link]
        if max(mine) == 0:
            bad[node] = "wrong sums on every link"
        elif len(bandwidths) > 2 and max(mine) < least_share * median:
            bad[node] = f"at most {max(mine):.2f} GB/s on its links, the median is {median:.2f}"
    return bad


def main(arguments: Sequence[str] | None = None) -> int:
    """One rank of the check; 0 when every node is fine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="shared folder of this attempt")
    parser.add_argument("--megabytes", type=int, default=256)
    options = parser.parse_args(arguments)
    me = facts()
    world = init_world(timeout_seconds=COLLECTIVE_SECONDS)
    cuda = world.device.type == "cuda"
    everyone = world.gather_objects(me.node_rank)
    measured = _measure(me, everyone, world.device, options.megabytes if cuda else min(options.megabytes, 16))
    results = world.gather_objects(measured)
    world.close()
    return _report(results, options.folder) if me.rank == 0 else 0


def _measure(me: RankFacts, node_of: Sequence[int], device: Any, megabytes: int) -> dict[Link, float]:
    """GB/s of this node's links, as this rank saw them; 0 for a wrong sum."""
    import torch
    import torch.distributed as dist

    found: dict[Link, float] = {}
    for pairs in ring(me.num_nodes):
        for link in pairs:
            members = [rank for rank, node in enumerate(node_of) if node in link]
            group = dist.new_group(members)
            if me.rank not in members:
                continue
            buffer = torch.ones(megabytes * 2**18, device=device)
            dist.all_reduce(buffer, group=group)  # connects, and is the one whose sum is checked
            right = bool((buffer == len(members)).all())
            _finish(device)
            began = time.perf_counter()
            for _ in range(REPEATS):
                dist.all_reduce(buffer.fill_(1.0), group=group)
            _finish(device)
            seconds = (time.perf_counter() - began) / REPEATS
            moved = 2 * (len(members) - 1) / len(members) * buffer.numel() * 4
            found[link] = moved / seconds / 1e9 if right and bool((buffer == len(members)).all()) else 0.0
    return found


def _finish(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _report(results: Sequence[Mapping[Link, float]], folder: Path) -> int:
    slowest: dict[Link, float] = {}
    for result in results:
        for link, speed in result.items():
            slowest[link] = min(speed, slowest.get(link, speed))
    nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    names = expand(nodes) if nodes else [str(node) for link in slowest for node in link]
    for (one, other), speed in sorted(slowest.items()):
        print(
            f"link {names[one]} – {names[other]}: " + (f"{speed:.2f} GB/s" if speed else "WRONG SUM"),
            flush=True,
        )
    bad = bad_nodes(slowest)
    for node, reason in bad.items():
        sys.stderr.write(f"preflight: bad node {names[node]}: {reason}\n")
    if bad and 2 * len(bad) <= len(names):
        folder.joinpath("bad").write_text("".join(f"{names[node]}\t{why}\n" for node, why in bad.items()))
    elif bad:
        fault = f"{len(bad)} of {len(names)} nodes fail the check of the links: the network is to blame, not a node"
        folder.joinpath("check").write_text(f"{fault}\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
