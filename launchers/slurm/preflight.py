"""Half a minute on the allocation before training: every node looks at itself, the first compares and names the bad.

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

WAIT_SECONDS = 30.0
_GPU_QUERY = "name,driver_version,clocks.max.sm,ecc.errors.uncorrected.volatile.total"


@dataclass(frozen=True)
class NodeReport:
    """What one node says about itself. ``problem`` is empty when it can work.

    ``about_folder``: the problem may lie in the filesystem all nodes share, not in the node.
    """

    node: str
    problem: str = ""
    about_folder: bool = False
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
        return NodeReport(
            node, f"cannot write to {workdir}: {error.strerror}", about_folder=True, python=python
        )
    names, drivers, clocks, problem = _gpus(gpus)
    if not problem and len(names) < gpus:
        problem = f"{len(names)} of {gpus} GPUs answer"
    short = not problem and free < min_free_gigabytes
    if short:
        problem = f"{free:.1f} GB free in {workdir}, {min_free_gigabytes:g} wanted"
    return NodeReport(
        node=node,
        problem=problem,
        about_folder=short,
        num_gpus=len(names),
        driver=_one(drivers),
        gpu_name=_one(names),
        max_clock=_one(clocks),
        python=python,
        clock_skew=skew,
        free_gigabytes=free,
    )


def judge(reports: Sequence[NodeReport], max_skew: float = 30.0) -> dict[str, str]:
    """Bad nodes and why: their own problem, or a driver, GPU, clock rate or Python unlike the majority's."""
    bad = {report.node: report.problem for report in reports if report.problem}
    good = [report for report in reports if not report.problem]
    for field in ("driver", "gpu_name", "max_clock", "python"):
        counts = Counter(getattr(report, field) for report in good)
        if len(counts) < 2:
            continue
        usual, votes = counts.most_common(1)[0]
        for report in good:
            value = getattr(report, field)
            if value != usual and votes > counts[value]:
                bad.setdefault(report.node, f"{field} {value or 'unknown'}, the others have {usual}")
    for report in good:
        if abs(report.clock_skew) > max_skew:
            bad.setdefault(report.node, f"its clock is {report.clock_skew:+.0f} s off the filesystem's")
    return bad


def main(arguments: Sequence[str] | None = None) -> int:
    """One task of the preflight; 0 when every node is fine."""
    parser = argparse.ArgumentParser(prog="python -m launchers.slurm.preflight", description=__doc__)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="shared folder of this attempt")
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=0, help="GPUs wanted on every node")
    parser.add_argument("--min-free-gigabytes", type=float, default=1.0)
    options = parser.parse_args(arguments)
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    report = probe(node, options.workdir, options.gpus, options.min_free_gigabytes)
    _write(options.folder / f"node-{node}.json", report)
    if os.environ.get("SLURM_PROCID", "0") != "0":
        return 0
    reports = _gather(options.folder, options.nodes)
    bad = judge(reports)
    if len(reports) < options.nodes:
        seen = ", ".join(sorted(report.node for report in reports))
        sys.stderr.write(
            f"preflight: {len(reports)} of {options.nodes} nodes wrote to {options.folder}: {seen}\n"
        )
        missing = set(_allocated()) - {report.node for report in reports}
        bad.update(dict.fromkeys(missing, f"does not see {options.folder}"))
    for name, reason in sorted(bad.items()):
        sys.stderr.write(f"preflight: bad node {name}: {reason}\n")
    everywhere = len(reports) == options.nodes and all(report.about_folder for report in reports)
    if bad and not everywhere:  # no use in excluding nodes for what is wrong with the folder itself
        (options.folder / "bad").write_text("".join(f"{name}\n" for name in sorted(bad)))
    return 1 if bad or len(reports) < options.nodes else 0


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


def _write(path: Path, report: NodeReport) -> None:
    partial = path.with_suffix(".tmp")
    try:
        partial.write_text(json.dumps(asdict(report)))
        partial.replace(path)
    except OSError as error:
        sys.stderr.write(f"preflight: {report.node} cannot write to {path.parent}: {error.strerror}\n")


def _gather(folder: Path, expected: int) -> list[NodeReport]:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        reports = [NodeReport(**json.loads(path.read_text())) for path in sorted(folder.glob("node-*.json"))]
        if len(reports) >= expected or time.monotonic() > deadline:
            return reports
        time.sleep(0.2)


def _allocated() -> list[str]:
    from launchers.hostlist import expand

    nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    return expand(nodes) if nodes else []


if __name__ == "__main__":
    sys.exit(main())
