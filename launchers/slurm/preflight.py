"""A look at the allocation before training: every node looks at itself, the first one names those that are bad.

A fault that one node of several has is the node's. A fault that most nodes have, or that says nothing about a node (a
program that is not installed, a shared folder), is a fault of the check: nobody is excluded. A node that has not
answered is late, not bad; one that only differs from the others is named and used.

Run as one task per node by the job script. Each task writes ``node-NAME.json`` into a folder on the shared
filesystem, which shows that the folder is visible and writable from there; the first task reads them all.
Imports no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

WAIT_SECONDS = 120.0
"""Containers, Python from a busy filesystem and cached directories each take up to a minute."""
_GPU_QUERY = "name,driver_version,clocks.max.sm,ecc.errors.uncorrected.volatile.total"


@dataclass(frozen=True)
class NodeReport:
    """What one node says about itself. ``problem`` is empty when it can work.

    ``is_common``: the problem is not known to be the node's; it may lie in what all nodes share.
    """

    node: str
    problem: str = ""
    is_common: bool = False
    num_gpus: int = 0
    driver: str = ""
    gpu_name: str = ""
    max_clock: str = ""
    python: str = ""
    clock_skew: float = 0.0
    free_gigabytes: float = 0.0


def probe(node: str, workdir: Path, gpus: int, min_free_gigabytes: float) -> NodeReport:
    """Look at this node: devices, driver, run folder, free space, clock against the filesystem's."""
    python = sys.version.split()[0]
    try:
        marker = workdir / f".preflight-{uuid.uuid4().hex}"
        marker.write_text(node)
        skew = time.time() - marker.stat().st_mtime
        marker.unlink()
        free = shutil.disk_usage(workdir).free / 1e9
    except OSError as error:
        return NodeReport(node, f"cannot write to {workdir}: {error.strerror}", is_common=True, python=python)
    names, drivers, clocks, problem = _gpus(gpus)
    missing = bool(gpus) and shutil.which("nvidia-smi") is None
    if not problem and len(names) < gpus:
        problem = f"{len(names)} of {gpus} GPUs answer"
    short = not problem and free < min_free_gigabytes
    if short:
        problem = f"{free:.1f} GB free in {workdir}, {min_free_gigabytes:g} wanted"
    return NodeReport(
        node=node,
        problem=problem,
        is_common=short or missing,
        num_gpus=len(names),
        driver=_one(drivers),
        gpu_name=_one(names),
        max_clock=_one(clocks),
        python=python,
        clock_skew=skew,
        free_gigabytes=free,
    )


@dataclass(frozen=True)
class Judgement:
    """``bad``: nodes to exclude, with reasons. ``fault``: what is wrong with the check itself; then nobody is bad.

    ``late``: nodes that have not answered. ``remarks``: differences between nodes that can work.
    """

    bad: dict[str, str]
    fault: str = ""
    late: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def is_fine(self) -> bool:
        """Whether the job can start."""
        return not (self.bad or self.fault or self.late)


def judge(reports: Sequence[NodeReport], allocated: Sequence[str] = (), max_skew: float = 30.0) -> Judgement:
    """What the nodes' reports mean together.

    Args:
        allocated: the nodes that should have reported; default those that did.
    """
    problems = {report.node: report.problem for report in reports if report.problem}
    for report in reports:
        if not report.problem and abs(report.clock_skew) > max_skew:
            problems[report.node] = f"its clock is {report.clock_skew:+.0f} s off the filesystem's"
    late = tuple(sorted(set(allocated) - {report.node for report in reports}))
    common = [report.node for report in reports if report.is_common and report.problem]
    several = max(len(reports), len(allocated)) > 1
    remarks = tuple(_differences([report for report in reports if not report.problem]))
    if common or (several and 2 * len(problems) > len(reports)):
        return Judgement({}, _shared_fault(problems, len(reports)), late, remarks)
    return Judgement(problems, "", late, remarks)


def _shared_fault(problems: dict[str, str], num_nodes: int) -> str:
    """One line for a fault that is no single node's."""
    reason, count = Counter(problems.values()).most_common(1)[0]
    where = next(node for node, problem in problems.items() if problem == reason)
    return (
        f"{count} of {num_nodes} nodes, {where} for one: {reason}. "
        "That is taken for a fault of the setup, not of a node: no node is excluded"
    )


def _differences(reports: Sequence[NodeReport]) -> list[str]:
    found = []
    for field in ("driver", "gpu_name", "max_clock", "python"):
        nodes: dict[str, list[str]] = {}
        for report in reports:
            nodes.setdefault(getattr(report, field) or "unknown", []).append(report.node)
        if len(nodes) > 1:
            groups = (f"{value} on {', '.join(names)}" for value, names in sorted(nodes.items()))
            found.append(f"the nodes differ in {field}: {'; '.join(groups)}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """One task of the preflight; 0 when every node is fine."""
    parser = argparse.ArgumentParser(prog="python -m launchers.slurm.preflight", description=__doc__)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="shared folder of this attempt")
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=0, help="GPUs wanted on every node")
    parser.add_argument("--min-free-gigabytes", type=float, default=1.0)
    options = parser.parse_args(arguments)
    node = own_name()
    report = probe(node, options.workdir, options.gpus, options.min_free_gigabytes)
    write_report(options.folder / f"node-{node}.json", report)
    if os.environ.get("SLURM_PROCID", "0") != "0":
        return 0
    reports = gather_reports(options.folder, "node-*.json", options.nodes)
    return conclude(judge(reports, allocated_nodes()), options.folder)


def conclude(found: Judgement, folder: Path) -> int:
    """Say what a check found, and write it where the job script looks: ``bad``, ``check`` and ``late`` in ``folder``.

    Returns the exit code of the check.
    """
    for remark in found.remarks:
        sys.stderr.write(f"preflight: {remark}\n")
    for name, reason in sorted(found.bad.items()):
        sys.stderr.write(f"preflight: bad node {name}: {reason}\n")
    lines = [f"{name}\t{reason}" for name, reason in sorted(found.bad.items())]
    _write_lines(folder / "bad", lines)
    _write_lines(folder / "check", [found.fault] if found.fault else [])
    late = f"no answer within {WAIT_SECONDS:.0f} s from {', '.join(found.late)}"
    _write_lines(folder / "late", [late] if found.late else [])
    return 0 if found.is_fine else 1


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    if lines:
        path.write_text("".join(f"{' '.join(line.splitlines())}\n" for line in lines))


def _gpus(wanted: int) -> tuple[list[str], list[str], list[str], str]:
    if not wanted:
        return [], [], [], ""
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except FileNotFoundError:
        return (
            [],
            [],
            [],
            "nvidia-smi was not found; load what brings it, or set preflight: false in the profile",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], [], [], f"nvidia-smi does not answer: {error}"
    if answer.returncode:
        return [], [], [], f"nvidia-smi failed: {answer.stdout.strip() or answer.stderr.strip()}"
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines() if line.strip()]
    errors = sum(int(row[3]) for row in rows if len(row) > 3 and row[3].isdigit())
    problem = f"{errors} uncorrected memory errors on its GPUs" if errors else ""
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows], problem


def _one(values: Sequence[str]) -> str:
    return "+".join(sorted(set(values)))


def own_name() -> str:
    """This node as SLURM calls it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def write_report(path: Path, report: NodeReport) -> None:
    """Write a report whole, for ``gather_reports`` on the first task; a folder that cannot be written is said."""
    partial = path.with_suffix(".tmp")
    try:
        partial.write_text(json.dumps(asdict(report)))
        partial.replace(path)
    except OSError as error:
        sys.stderr.write(f"preflight: {report.node} cannot write to {path.parent}: {error.strerror}\n")


def gather_reports(folder: Path, pattern: str, expected: int) -> list[NodeReport]:
    """The reports under that name, as soon as ``expected`` are there; those there after ``WAIT_SECONDS``."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        reports = [NodeReport(**json.loads(path.read_text())) for path in sorted(folder.glob(pattern))]
        if len(reports) >= expected or time.monotonic() > deadline:
            return reports
        time.sleep(0.2)


def allocated_nodes() -> list[str]:
    """The nodes of this job."""
    from launchers.claims import expand

    nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    return expand(nodes) if nodes else []


if __name__ == "__main__":
    sys.exit(main())
