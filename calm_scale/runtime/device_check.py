"""One kernel and one collective on the GPUs of a job, with the Python and the torch that will train on them.

Run by the job script after the preflight, with the tasks of the training. nvidia-smi may list GPUs that torch cannot
use: a torch built for a newer driver, a GPU whose kernels fail, an NCCL that finds no way between nodes. Every task
multiplies two matrices on its GPU and on the CPU and writes what it found to the folder of the attempt; the first one
judges the nodes as the preflight does. Then all tasks add up their ranks in one all-reduce.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from calm_scale.config import load
from calm_scale.runtime.world import choose_device, init_world, nvidia_driver
from launchers import environment
from launchers.environment import RankFacts
from launchers.slurm.preflight import (
    WAIT_SECONDS,
    Judgement,
    NodeReport,
    allocated_nodes,
    conclude,
    gather_reports,
    judge,
    own_name,
    write_report,
)

COLLECTIVE_SECONDS = 90.0
LARGEST_ERROR = 5e-3
"""Of an fp32 product, relative to its largest element; TF32 reaches 1e-3."""


def main(arguments: Sequence[str] | None = None) -> int:
    """One task of the check; 0 when every GPU and the collective are fine, or the run trains on CPUs."""
    parser = argparse.ArgumentParser(prog="python -m calm_scale.runtime.device_check", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the run's stored configuration")
    parser.add_argument("--folder", type=Path, required=True, help="shared folder of this attempt")
    options = parser.parse_args(arguments)
    if load(options.config).device == "cpu":
        return 0
    me = environment.facts()
    write_report(options.folder / f"device-{me.rank:05d}.json", examine(me))
    if me.rank == 0:
        reports = gather_reports(options.folder, "device-*.json", me.world_size)
        if code := conclude(judge_ranks(reports, me), options.folder):
            return code
    problem = check_collective() if me.world_size > 1 else ""
    if problem:
        fault = f"the ranks' first all-reduce failed on {own_name()}: {problem}. {describe_setup()}"
        return conclude(Judgement({}, fault), options.folder)
    return 0


def examine(me: RankFacts) -> NodeReport:
    """What this rank's GPU does."""
    import torch

    problem = _one_line(check_kernel, me)
    if problem:
        problem = f"local rank {me.local_rank}: {problem}. {describe_setup()}"
    return NodeReport(
        own_name(),
        problem,
        # No other node to compare with: a build that cannot use the driver would look like this on every node.
        is_common=bool(problem)
        and (torch.version.cuda is None or (me.num_nodes == 1 and not torch.cuda.is_available())),
        driver=nvidia_driver(),
        python=sys.version.split()[0],
    )


def check_kernel(me: RankFacts) -> str:
    """What is wrong with a product on this rank's GPU; empty when it agrees with the CPU's.

    Raises:
        WorldError: torch can use no GPU, or none for this rank.
    """
    import torch

    device = choose_device("cuda", me)
    generator = torch.Generator().manual_seed(me.rank)
    a, b = (torch.randn(512, 512, generator=generator) for _ in range(2))
    expected = a @ b
    error = float(((a.to(device) @ b.to(device)).cpu() - expected).abs().max() / expected.abs().max())
    return "" if error <= LARGEST_ERROR else f"a matrix product on {device} is off by {error:.1%}"


def check_collective() -> str:
    """What is wrong with an all-reduce over all ranks; empty when its sum is right."""
    return _one_line(_add_up_ranks)


def judge_ranks(reports: Sequence[NodeReport], me: RankFacts) -> Judgement:
    """The nodes by the reports of their ranks: a node has the first problem of its ranks, and is late without all."""
    by_node: dict[str, list[NodeReport]] = {}
    for report in reports:
        by_node.setdefault(report.node, []).append(report)
    found = [
        next((report for report in ranks if report.problem), ranks[0])
        for ranks in by_node.values()
        if len(ranks) >= me.local_world_size or any(report.problem for report in ranks)
    ]
    judged = judge(found, allocated_nodes())
    return replace(judged, remarks=())  # the preflight has named the differences


def describe_setup() -> str:
    """Node, driver, torch build and visible devices, for a verdict."""
    import torch

    return (
        f"Node {socket.gethostname()}, driver {nvidia_driver()}, torch {torch.__version__} (built for CUDA "
        f"{torch.version.cuda or '-: a CPU build'}), CUDA_VISIBLE_DEVICES "
        f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}, {torch.cuda.device_count()} visible"
    )


def _add_up_ranks() -> str:
    import torch
    import torch.distributed as dist

    # The first rank comes when it has read all reports.
    world = init_world("cuda", timeout_seconds=COLLECTIVE_SECONDS, join_seconds=2 * WAIT_SECONDS)
    total = torch.tensor([float(world.rank)], device=world.device)
    dist.all_reduce(total)
    found, expected = int(total.item()), world.world_size * (world.world_size - 1) // 2
    world.close()
    return "" if found == expected else f"the sum is {found} instead of {expected}"


def _one_line(check: Callable[..., str], *arguments: object) -> str:
    """What a check says, or the first line of whatever it raises: any error of a driver is a finding here."""
    try:
        return check(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


if __name__ == "__main__":
    sys.exit(main())
