"""Sweeps: one run for every combination of some values, sharing what the values do not change. No torch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from calm_scale.config import ConfigError, RunConfig, load
from calm_scale.config.fields import policy_of
from calm_scale.config.run import keep_tokens
from calm_scale.config.run_folder import Stage

MOST_RUNS = 1000
_TOP_LEVEL_COMMA = re.compile(r",(?![^\[{]*[\]}])")
"""A comma between values, not one inside of a ``{…}`` or ``[…]``."""


@dataclass(frozen=True)
class Sweep:
    """A base run, whose stages are shared, and the runs that differ.

    Attributes:
        shared: stages that all runs have in common; the base run does them once.
        own: stages that each run does for itself, in its folder below ``<workdir>/sweep``.
        notes: batches that were changed so that every run trains on as many tokens.
    """

    base: RunConfig
    runs: tuple[RunConfig, ...]
    shared: tuple[Stage, ...]
    own: tuple[Stage, ...]
    notes: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where the runs lie."""
        return self.base.folder.sweep


def plan_sweep(path: Path, overrides: Sequence[str], sweeps: Sequence[str]) -> Sweep:
    """The runs of ``--sweep KEY=A,B`` options: the grid of all of them, with the tokens of a step of the base run.

    Args:
        path: the base run's file.
        overrides: ``--set`` values of all runs.
        sweeps: ``key.path=value,value,…``, one for each swept key.

    Raises:
        ConfigError: a text is not of that form, a key trains nothing or stands twice, a run is not valid, or cannot
            have as many tokens a step.
    """
    axes = [_axis(text) for text in sweeps]
    keys = [key for key, _ in axes]
    if len(set(keys)) < len(keys):
        raise ConfigError(f"--sweep names a key twice: {', '.join(keys)}; give all its values in one")
    base = load(path, overrides)
    shared, own = _split(base, min((_first_stage(key) for key in keys), key=list(Stage).index))
    points = list(itertools.product(*(values for _, values in axes)))
    if len(points) > MOST_RUNS:
        raise ConfigError(f"this sweep has {len(points)} runs, more than {MOST_RUNS}")
    runs, notes = [], []
    for point in points:
        pairs = list(zip(keys, point, strict=True))
        slug = "_".join(f"{_short(key, keys)}-{_plain(value)}" for key, value in pairs)
        values = [f"{key}={value}" for key, value in pairs]
        run, changed = keep_tokens(base, _placed(load(path, [*overrides, *values]), base, slug, own))
        runs.append(run)
        notes += changed
    names = [run.name for run in runs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"--sweep: values that look the same in a name: {', '.join(twice)}")
    _refuse_equal(runs)
    return Sweep(base, tuple(runs), shared, own, tuple(notes))


def _refuse_equal(runs: Sequence[RunConfig]) -> None:
    """Values that are written differently may mean the same run (1e-3 and 0.001)."""
    seen: dict[str, str] = {}
    for run in runs:
        meaning = run.model_dump_json(exclude={"name", "workdir"})
        if meaning in seen:
            raise ConfigError(f"--sweep: {seen[meaning]} and {run.name} are the same run twice")
        seen[meaning] = run.name


def _axis(text: str) -> tuple[str, list[str]]:
    key, separator, listed = text.partition("=")
    values = [value.strip() for value in _TOP_LEVEL_COMMA.split(listed)]
    if not separator or not key.strip() or not all(values):
        raise ConfigError(
            f"--sweep {text}: write it as key.path=value,value, e.g. lm.training.optimizer.lr=1e-4,2e-4"
        )
    if len(set(values)) < len(values):
        raise ConfigError(f"--sweep {text}: a value is listed twice")
    return key.strip(), values


def _first_stage(key: str) -> Stage:
    """The first stage of the chain that the field changes."""
    stage = policy_of(key).sweep
    if stage is None:
        swept = [name for name in RunConfig.model_fields if policy_of(name).sweep]
        raise ConfigError(f"--sweep {key}: changes nothing that is trained; sweep {', '.join(swept)}")
    return stage


def _split(base: RunConfig, first: Stage) -> tuple[tuple[Stage, ...], tuple[Stage, ...]]:
    present = base.stages
    own = tuple(stage for stage in present if list(Stage).index(stage) >= list(Stage).index(first))
    if not own:
        raise ConfigError(f"--sweep: run {base.name} has no section for stage {first} or a later one")
    return tuple(stage for stage in present if stage not in own), own


def _placed(run: RunConfig, base: RunConfig, slug: str, own: Sequence[Stage]) -> RunConfig:
    """The run under a name and in a folder of its own, using what it shares where the base run has it."""
    lm, shares_autoencoder = run.lm, Stage.AUTOENCODER not in own and run.autoencoder is not None
    if lm is not None and lm.autoencoder is None and shares_autoencoder:
        lm = lm.model_copy(update={"autoencoder": base.autoencoder_export})
    return run.model_copy(
        update={
            "name": f"{base.name}-{slug}",
            "workdir": base.folder.sweep / slug,
            "tokenizer": run.tokenizer.model_copy(update={"path": run.tokenizer.path or base.tokenizer_path}),
            "data": None if Stage.PREP in own else base.data_dir,
            "lm": lm,
        }
    )


def _short(key: str, keys: Sequence[str]) -> str:
    """The last words of a key that tell it from the other ones."""
    parts = key.split(".")
    for length in range(1, len(parts) + 1):
        tail = parts[-length:]
        if sum(other.split(".")[-length:] == tail for other in keys) == 1:
            return ".".join(tail)
    return key


def _plain(value: str) -> str:
    """A value as it can stand in a name."""
    return re.sub(r"[^A-Za-z0-9.+]+", "-", value).replace("+", "").strip("-.") or "empty"
