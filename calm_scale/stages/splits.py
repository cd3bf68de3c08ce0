"""Opening a prepared split for a run, with the checks that must fail before a rank touches a model."""

from __future__ import annotations

from calm_scale.config import ConfigError, RunConfig
from data_prep.manifest import MANIFEST_NAME
from data_prep.reading import ShardDataset


def open_split(
    config: RunConfig, split: str, tokens_per_sample: int, *, partial: bool = False
) -> ShardDataset:
    """The samples of one split: whole ones, and with ``partial`` the shorter last ones too.

    Raises:
        ConfigError: the split is not prepared, or its ids or alignment do not fit the run.
        ShardError: a shard is missing or changed.
    """
    folder = config.data_dir / split
    if not (folder / MANIFEST_NAME).is_file():
        raise ConfigError(
            f"{folder}: no prepared `{split}` split ({MANIFEST_NAME} is missing); run `calm-scale prep` first"
        )
    dataset = ShardDataset(folder, tokens_per_sample, partial=partial)
    manifest = dataset.manifest
    if manifest.max_id >= config.vocab_size:
        raise ConfigError(
            f"{folder}: holds token id {manifest.max_id}, but vocab_size is {config.vocab_size}; "
            f"set vocab_size to at least {manifest.max_id + 1}"
        )
    if manifest.alignment % config.patch_size:
        raise ConfigError(
            f"{folder}: documents are aligned to {manifest.alignment} tokens, patch_size {config.patch_size} "
            "does not divide that; prepare the data with another prep.alignment"
        )
    return dataset


def open_if_prepared(config: RunConfig, split: str, tokens_per_sample: int) -> ShardDataset | None:
    """The samples of a split, or None where the run has none."""
    if not (config.data_dir / split / MANIFEST_NAME).is_file():
        return None
    dataset = open_split(config, split, tokens_per_sample)
    return dataset if len(dataset) else None
