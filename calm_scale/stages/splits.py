"""Opening a prepared split for a run, with the checks that must fail before a rank touches a model."""

from __future__ import annotations

from calm_scale.config import ConfigError, RunConfig
from calm_scale.config.data import ENCODES, TokenizerConfig
from data_prep.shards.manifest import MANIFEST_NAME, Manifest
from data_prep.shards.reading import ShardDataset


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


def open_training_split(config: RunConfig, split: str, tokens_per_sample: int) -> ShardDataset:
    """The samples that a stage trains on.

    Raises:
        ConfigError: as ``open_split``, or the run's own data was prepared otherwise than the document says.
        ShardError: a shard is missing or changed, or the split holds not even one sample.
    """
    dataset = open_split(config, split, tokens_per_sample)
    dataset.refuse_none()
    other = prepared_otherwise(config, dataset.manifest)
    if other and config.data is None:
        raise ConfigError(
            f"{dataset.split_dir}: {'; '.join(other)}; take the document's value back, prepare again with "
            "`calm-scale prep --restart`, or name data that was prepared elsewhere in `data`"
        )
    return dataset


def prepared_otherwise(config: RunConfig, manifest: Manifest) -> list[str]:
    """Settings of prep and tokenizer under which the document would have made other shards than the manifest's."""
    prep = config.prep
    if prep is None:
        return []
    pairs: list[tuple[str, object, object]] = [
        ("prep.sequence_length", prep.sequence_length, manifest.sequence_length),
        ("prep.alignment", prep.alignment, manifest.alignment),
        ("prep.packing", prep.packing, manifest.packing),
        ("prep.dtype", manifest.dtype if prep.dtype == "auto" else prep.dtype, manifest.dtype),
        ("tokenizer.add_bos", config.tokenizer.add_bos, manifest.add_bos),
        ("tokenizer.add_eos", config.tokenizer.add_eos, manifest.add_eos),
    ]
    return [f"{key} is {ours}, the shards have {theirs}" for key, ours, theirs in pairs if ours != theirs]


def as_prepared(config: RunConfig, manifest: Manifest) -> RunConfig:
    """The run with the special tokens, the BOS/EOS policy and the encoder of its shards, whatever the document says.

    A model goes on from texts as it was trained on them; the shards may have been prepared elsewhere (``data``).
    """
    stated = manifest.provenance.get("tokenizer", {})
    settings = {name: stated[name] for name in ENCODES if name in stated}
    if settings.get("encoder") == "auto":  # which gives the ids of any encoder
        del settings["encoder"]
    settings |= {"add_bos": manifest.add_bos, "add_eos": manifest.add_eos}
    tokenizer = TokenizerConfig.model_validate({**config.tokenizer.model_dump(), **settings})
    return config.model_copy(update={"tokenizer": tokenizer})


def open_if_prepared(config: RunConfig, split: str, tokens_per_sample: int) -> ShardDataset | None:
    """The samples of a split, or None where the run has none."""
    if not (config.data_dir / split / MANIFEST_NAME).is_file():
        return None
    dataset = open_split(config, split, tokens_per_sample)
    return dataset if len(dataset) else None
