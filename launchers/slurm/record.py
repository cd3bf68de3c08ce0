"""``<workdir>/slurm/``: the record of what was submitted, and what the job scripts wrote down about themselves."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from calm_scale.config.exclusive import exclusive
from calm_scale.config.files import write_atomically
from calm_scale.config.run_folder import RunFolder
from launchers.errors import LaunchError


@dataclass(frozen=True)
class SubmittedJob:
    """One stage's latest job. ``array_index`` names the task that is this run's in a sweep."""

    stage: str
    job_id: str
    fingerprint: str
    submitted: float
    array_index: int | None = None

    @property
    def task_id(self) -> str:
        """The id that names exactly this run's job."""
        return self.job_id if self.array_index is None else f"{self.job_id}_{self.array_index}"


@dataclass(frozen=True)
class Attempt:
    """One life of a job, as its script wrote it down; ``cause`` is empty while it runs."""

    number: int
    job_id: str
    started_at: int
    start_time: float
    nodes: str
    cause: str = ""
    code: int | None = None
    ended_at: int | None = None
    end_time: float | None = None


class RunRecord:
    """The folder ``<workdir>/slurm`` of one run."""

    def __init__(self, workdir: Path) -> None:
        self.workdir = workdir
        self.folder = RunFolder(workdir).slurm
        self.state = self.folder / "state"

    def create(self) -> None:
        """Make the folders the jobs write to."""
        for folder in (self.state, self.folder / "logs"):
            folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Only one submission or cancellation of this run at a time."""
        with exclusive(self.folder / ".lock", patience=None):
            yield

    def jobs(self) -> dict[str, SubmittedJob]:
        """The latest job of each stage."""
        path = self.folder / "jobs.json"
        if not path.is_file():
            return {}
        try:
            return {entry["stage"]: SubmittedJob(**entry) for entry in json.loads(path.read_text())["jobs"]}
        except (ValueError, KeyError, TypeError) as error:
            raise LaunchError(
                f"{path} cannot be read ({error}); remove it if no job of this run is queued"
            ) from None

    def write_jobs(self, jobs: dict[str, SubmittedJob]) -> None:
        """Replace the record, whole or not at all."""
        write_atomically(
            self.folder / "jobs.json", json.dumps({"jobs": [asdict(job) for job in jobs.values()]}, indent=1)
        )

    def is_done(self, stage: str, fingerprint: str) -> bool:
        """Whether the stage has finished with exactly this configuration."""
        marker = self.state / f"{stage}.done"
        return marker.is_file() and marker.read_text().strip() == fingerprint

    def has_finished(self, stage: str) -> bool:
        """Whether the stage has finished, with whatever configuration."""
        return (self.state / f"{stage}.done").is_file()

    def request_cancel(self, stage: str) -> None:
        """Tell the running script of a stage that it must not requeue itself."""
        (self.state / f"{stage}.cancel").touch()

    @property
    def exclusions(self) -> Exclusions:
        """Nodes that a preflight found bad."""
        return Exclusions(self.state / "exclude")

    def verdict(self, stage: str) -> str:
        """What the latest failing attempt ended with; empty without one."""
        path = self.state / f"{stage}.verdict"
        return path.read_text() if path.is_file() else ""

    def attempts(self, stage: str) -> list[Attempt]:
        """Every attempt of a stage, oldest first; a torn line is passed over."""
        path = self.state / f"{stage}.attempts"
        found: dict[int, Attempt] = {}
        for line in path.read_text().splitlines() if path.is_file() else []:
            with contextlib.suppress(ValueError):
                _read_line(line, found)
        return [found[number] for number in sorted(found)]

    def evaluation_jobs(self) -> dict[int, str]:
        """Jobs that a training job asked for, by checkpoint step."""
        found: dict[int, str] = {}
        for path in self.state.glob("eval-*.submitted"):
            step = path.name.removeprefix("eval-").removesuffix(".submitted")
            if step.isdigit() and (job := path.read_text().split(";")[0].strip()):
                found[int(step)] = job
        return found


def _read_line(line: str, found: dict[int, Attempt]) -> None:
    kind, *fields = line.split(maxsplit=7)
    if kind == "start" and len(fields) == 5:
        number, job, at, when, nodes = fields
        found[int(number)] = Attempt(int(number), job, int(at), float(when), nodes)
    elif kind == "end" and len(fields) == 7:
        number, job, cause, code, start, end, when = fields
        before = found.get(int(number)) or Attempt(int(number), job, int(start), float(when), "")
        found[int(number)] = Attempt(
            before.number,
            job,
            int(start),
            before.start_time,
            before.nodes,
            cause,
            int(code),
            int(end),
            float(when),
        )


EXCLUDE_SECONDS = 24 * 3600
"""A node found bad is excluded for so long: most faults are mended, or drain the node, within a day."""


@dataclass(frozen=True)
class Exclusion:
    """``until``: seconds since 1970."""

    node: str
    until: float
    reason: str


class Exclusions:
    """The file of one run. A line without a time is from an older version, which excluded for good: it has ended."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def current(self, now: float | None = None) -> list[Exclusion]:
        """What holds at this moment, by node; of several findings about a node the latest."""
        now = time.time() if now is None else now
        found: dict[str, Exclusion] = {}
        for line in self._path.read_text().splitlines() if self._path.is_file() else []:
            node, until, reason, *_ = [*line.split("\t"), "", ""]
            if until.isdigit() and int(until) > now:
                found[node] = Exclusion(node, int(until), reason)
        return [found[node] for node in sorted(found)]

    def lift(self, nodes: list[str]) -> list[str]:
        """Take nodes out of the list; returns those that were in it."""
        current = self.current()
        lifted = [entry.node for entry in current if entry.node in nodes]
        if lifted:
            kept = [entry for entry in current if entry.node not in nodes]
            text = "".join(f"{entry.node}\t{entry.until:.0f}\t{entry.reason}\n" for entry in kept)
            write_atomically(self._path, text)
        return lifted
