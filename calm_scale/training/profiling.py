"""Steps of a training recorded by torch's profiler: a Chrome trace for each chosen rank."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from calm_scale.config.errors import ConfigError
from calm_scale.config.run_folder import StageFolder
from calm_scale.config.training import ProfileConfig
from calm_scale.training.attempt import Training

WARM_UP_STEPS = 3
"""The first steps of an attempt compile kernels, open connections and fill caches: by default they are left out."""


class StepProfiler:
    """Records the configured steps; without ``training.profile`` it does nothing.

    Args:
        done: steps that are done already.

    Raises:
        ConfigError: a rank is chosen that there is not.
    """

    def __init__(self, training: Training, done: int) -> None:
        config = training.config.profile
        self._telemetry, self._world = training.telemetry, training.world
        self._folder = StageFolder(training.attempt.folder).profile
        self._attempt = training.attempt.number
        self._steps = _chosen(config, done, training.config.steps)
        self._ranks = config.ranks if config else ()
        self._profiler: Any = None
        self._label: Any = None
        self._last = 0
        _check(self._ranks, training.world.world_size)
        if config and not self._steps:
            self._telemetry.say(
                "profile: the steps to record are done, or beyond the last one; nothing is recorded"
            )

    def __enter__(self) -> StepProfiler:
        return self

    def begin(self, step: int) -> None:
        """Before the batch of the step is read."""
        if step not in self._steps:
            return
        if step == self._steps[0]:
            self._telemetry.say(f"profile: recording {self._what(self._steps[-1])}")
            if self._world.rank in self._ranks:
                self._start()
        if self._profiler is not None:
            self._label = torch.profiler.record_function(f"training step {step}")
            self._label.__enter__()

    def end(self, step: int) -> None:
        """After the step."""
        if step not in self._steps:
            return
        if self._label is not None:
            self._label.__exit__(None, None, None)
            self._label = None
        self._last = step
        if step == self._steps[-1]:
            self._finish()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._last in self._steps[:-1]:  # stopped in between: what was recorded counts
            self._finish()

    def _start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._world.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def _finish(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._write()
            self._profiler = None
        self._telemetry.say(f"profile: recorded {self._what(self._last)}")
        self._steps = range(0)

    def _write(self) -> None:
        path = self._path()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            self._telemetry.warn(f"profile: {path} could not be written: {error}")

    def _path(self) -> Path:
        name = f"attempt{self._attempt}-steps{self._steps[0]}-{self._last}-rank{self._world.rank}.json"
        return self._folder / name

    def _what(self, last: int) -> str:
        ranks = f"rank{'s' if len(self._ranks) > 1 else ''} {', '.join(map(str, self._ranks))}"
        return f"steps {self._steps[0]} to {last} on {ranks} in {self._folder}"


def _chosen(config: ProfileConfig | None, done: int, total: int) -> range:
    """The steps to record; empty where there is nothing to record any more."""
    if config is None:
        return range(0)
    latest = max(done + 1, total - config.steps + 1)
    first = min(done + 1 + WARM_UP_STEPS, latest) if config.first_step is None else config.first_step
    return range(max(first, done + 1), min(first + config.steps, total + 1))


def _check(ranks: tuple[int, ...], world_size: int) -> None:
    if missing := [rank for rank in ranks if rank >= world_size]:
        raise ConfigError(f"training.profile.ranks: there is no rank {missing[0]} among {world_size} ranks")
