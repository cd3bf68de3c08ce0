"""A run's folder: where the resolved configuration is kept, so that a folder alone tells what ran there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from calm_scale.config import ConfigError, RunConfig, load, to_yaml

CONFIG_FILE = "config.yaml"


def store_config(config: RunConfig) -> Path:
    """Write the resolved configuration into the run folder (atomically; a later attempt replaces it)."""
    folder = config.workdir
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / CONFIG_FILE
    partial = folder / f".{CONFIG_FILE}.{os.getpid()}"
    partial.write_text(to_yaml(config), encoding="utf-8")
    partial.replace(target)
    return target


def config_of(target: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a YAML file or of a run folder."""
    if not target.is_dir():
        return load(target, overrides)
    stored = target / CONFIG_FILE
    if not stored.is_file():
        raise ConfigError(f"{target}: not a run folder, it holds no {CONFIG_FILE}")
    return load(stored, overrides)
