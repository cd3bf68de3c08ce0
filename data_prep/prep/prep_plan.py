"""The plan of a prep: what is read, in which units, under which settings, and an estimate of what that gives.

It holds everything that decides the bytes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from calm_scale.config import RunConfig
from calm_scale.config.data import PrepConfig, TokenizerConfig
from calm_scale.config.errors import EXIT_USAGE, ConfigError
from data_prep.errors import PrepError, SourceError
from data_prep.inputs import Input, ignore, list_inputs
from data_prep.inputs.records import Reader
from data_prep.shards import SUFFIX, token_dtype
from data_prep.tokenizer import Tokenizer, load_tokenizer

MOST_IDS = 1 << 29
"""Held in memory at once: more than the longest line that is read and a window of documents ever need together."""
_MEGABYTE = 1_000_000
_SMALLEST_SEGMENT = 8 * _MEGABYTE
_TYPICAL_SEGMENTS = 64
BYTES_PER_TOKEN = 4.0
"""Where no tokenizer can be asked."""
BYTES_PER_SECOND = 60e6
"""Of text, one worker: an assumption."""
SHARD_OVERHEAD = 1.05
_SAMPLED_BYTES = 1_000_000
_LEAST_SAMPLED_BYTES = 32_000


@dataclass(frozen=True)
class Split:
    """Documents whose hash, as a share of its range, lies in [low, high)."""

    name: str
    low: float
    high: float


@dataclass(frozen=True)
class Plan:
    """What a prep will do. Two plans with one ``key`` write the same bytes, whoever carries them out."""

    prep: PrepConfig
    inputs: tuple[Input, ...]
    splits: tuple[Split, ...]
    segment_bytes: int
    dtype: str
    vocab_size: int
    tokenizer: dict[str, Any]
    tokenizer_config: TokenizerConfig
    pad_id: int | None
    bytes_per_token: float
    """Of text, measured on the first documents; an assumption where none could be read."""

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Every setting that decides the shards (not the workers, what is refused, or the weights)."""
        prep = self.prep.settings_that(lambda policy: policy.prep)
        for source in prep["sources"]:
            if source["kind"] is None:
                del source["kind"]  # as in plans from before there were readers of one's own
        return {
            "prep": prep,
            "inputs": [item.as_dict() for item in self.inputs],
            "segment_bytes": self.segment_bytes,
            "dtype": self.dtype,
            "vocab_size": self.vocab_size,
            "tokenizer": self.tokenizer,
        }

    @cached_property
    def key(self) -> str:
        """Hex digest of the settings; the times of the inputs are no part of it."""
        timeless = [{k: v for k, v in item.items() if k != "mtime_ns"} for item in self.settings["inputs"]]
        text = json.dumps({**self.settings, "inputs": timeless}, sort_keys=True)
        return xxhash.xxh3_128_hexdigest(text.encode())

    @property
    def text_bytes(self) -> int:
        """Estimated bytes of text over all inputs."""
        return sum(item.text_bytes for item in self.inputs)

    @property
    def disk_bytes(self) -> int:
        """Estimated bytes of shards."""
        return int(self.text_bytes / self.bytes_per_token * np.dtype(self.dtype).itemsize * SHARD_OVERHEAD)

    @property
    def seconds(self) -> float:
        """Estimated wall-clock time with this plan's workers."""
        return self.text_bytes / (BYTES_PER_SECOND * self.prep.workers)

    def expected_segments(self, item: Input) -> int:
        """Estimated segments of one input, at least 1."""
        return max(1, -(-item.text_bytes // self.segment_bytes))


def make_plan(config: RunConfig, tokenizer: Tokenizer, tell: Callable[[str], object] = ignore) -> Plan:
    """List the inputs and settle every choice that decides the bytes; ``tell`` is given a line on what is left out.

    Raises:
        ConfigError: no ``prep`` section, or the tokenizer does not fit the vocabulary or the packing.
        SourceError: an input is missing.
        ShardError: the id type is too narrow.
    """
    prep = config.prep
    if prep is None:
        raise ConfigError("prep: this configuration has no `prep` section, so there is nothing to prepare")
    check_tokenizer(prep, config.vocab_size, tokenizer)
    inputs = tuple(list_inputs(prep.sources, tell))
    text = sum(item.text_bytes for item in inputs)
    return Plan(
        prep=prep,
        inputs=inputs,
        splits=_splits(prep),
        segment_bytes=_segment_bytes(prep, text),
        dtype=token_dtype(tokenizer.max_id, prep.dtype).name,
        vocab_size=config.vocab_size,
        tokenizer={
            "name": tokenizer.name,
            "fingerprint": tokenizer.fingerprint,
            "max_id": tokenizer.max_id,
            "add_bos": tokenizer.add_bos,
            "add_eos": tokenizer.add_eos,
        },
        tokenizer_config=config.tokenizer.model_copy(update={"path": config.tokenizer_path}),
        pad_id=tokenizer.pad_id,
        bytes_per_token=measure(inputs, prep, tokenizer).bytes_per_token or BYTES_PER_TOKEN,
    )


def check_tokenizer(prep: PrepConfig, vocab_size: int, tokenizer: Tokenizer) -> None:
    """Raises ConfigError where the tokenizer does not fit the vocabulary or the packing, ShardError where the id type
    is too narrow."""
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"vocab_size is {vocab_size}, but the tokenizer's ids reach {tokenizer.max_id} (special and "
            f"padding tokens included): set vocab_size to at least {tokenizer.vocab_size}"
        )
    if prep.packing != "concat" and tokenizer.pad_id is None:
        raise ConfigError(
            f"prep.packing {prep.packing} needs a padding token and the tokenizer has none by a usual name: set "
            "tokenizer.pad_token (a new name takes the next free id)"
        )
    token_dtype(tokenizer.max_id, prep.dtype)


def _splits(prep: PrepConfig) -> tuple[Split, ...]:
    held, auto = prep.splits.heldout, prep.splits.autoencoder
    bounds = (("heldout", 0.0, held), ("autoencoder", held, held + auto), ("train", held + auto, 1.0))
    return tuple(Split(name, low, high) for name, low, high in bounds if high > low)


def _segment_bytes(prep: PrepConfig, text_bytes: int) -> int:
    """About 64 segments, none under 8 MB, none over what fills a shard: from the input's size alone."""
    if prep.segment_megabytes is not None:
        return max(1, int(prep.segment_megabytes * _MEGABYTE))
    largest = prep.shard_megabytes * _MEGABYTE
    return min(largest, max(_SMALLEST_SEGMENT, text_bytes // _TYPICAL_SEGMENTS))


def check_disk(plan: Plan, data_dir: Path) -> int:
    """Free bytes where the shards will go.

    Shards that an earlier attempt left are not written again, or are removed first.

    Raises:
        PrepError: the estimate of what is still to come does not fit.
    """
    place = data_dir
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    shards = (shard for split in plan.splits for shard in (data_dir / split.name).glob(f"*{SUFFIX}"))
    there = sum(shard.stat().st_size for shard in shards)
    need = plan.disk_bytes - there
    if need > free:
        written = f" beside the {there / 1e9:,.3f} GB that are there" if there else ""
        raise PrepError(
            f"the shards need about {need / 1e9:,.3f} GB{written}, {place} has {free / 1e9:,.3f} GB free: free some "
            "space or set `data` to another disk"
        )
    return free


@dataclass(frozen=True)
class Estimate:
    """Sizes of a prep.

    Attributes:
        num_inputs: files (a dataset counts as one, its size is not known).
        stored_bytes: as they lie on disk.
        text_bytes: of records, uncompressed.
        num_documents: by the mean length of the first ones; 0 where none could be read.
        bytes_per_token: of the first records of each source under the run's tokenizer, else :data:`BYTES_PER_TOKEN`.
        sampled: whether it was measured.
        bytes_per_id: in a shard.
    """

    num_inputs: int
    stored_bytes: int
    text_bytes: int
    num_documents: int
    bytes_per_token: float
    sampled: bool
    bytes_per_id: int

    @property
    def tokens(self) -> float:
        """Of all splits together."""
        return self.text_bytes / self.bytes_per_token

    @property
    def shard_bytes(self) -> float:
        """On disk when the prep is done."""
        return self.tokens * self.bytes_per_id * SHARD_OVERHEAD

    def seconds(self, workers: int) -> float:
        """Wall-clock time with that many workers."""
        return self.text_bytes / (BYTES_PER_SECOND * workers)


def estimate(config: RunConfig, tell: Callable[[str], object] = ignore) -> Estimate:
    """Look at the inputs of a run's prep; reads a few megabytes at most. ``tell``: see ``make_plan``.

    Raises:
        ConfigError: there is no ``prep`` section.
        SourceError: an input is missing or cannot be read.
    """
    if config.prep is None:
        raise ConfigError(f"run {config.name}: there is no `prep` section")
    inputs = list_inputs(config.prep.sources, tell)
    text = sum(item.text_bytes for item in inputs)
    measured = measure(inputs, config.prep, _load_tokenizer(config))
    return Estimate(
        num_inputs=len(inputs),
        stored_bytes=sum(item.size for item in inputs),
        text_bytes=text,
        num_documents=round(measured.documents_per_byte * text),
        bytes_per_token=measured.bytes_per_token or BYTES_PER_TOKEN,
        sampled=measured.bytes_per_token > 0,
        bytes_per_id=token_dtype(config.vocab_size - 1, config.prep.dtype).itemsize,
    )


@dataclass(frozen=True)
class Measured:
    """Rates over all sources, weighted by their bytes of text; 0 where nothing could be read or encoded."""

    bytes_per_token: float
    documents_per_byte: float


def measure(inputs: Sequence[Input], prep: PrepConfig, tokenizer: Tokenizer | None) -> Measured:
    """Encode the first documents of the first input of each source, padding of ``aligned`` packing included.

    What cannot be read counts like the other sources; a name on a hub is not asked.

    Raises:
        SourceError: a table has no such column.
    """
    largest = max(_SAMPLED_BYTES // len(prep.sources), _LEAST_SAMPLED_BYTES)
    sizes, documents, tokens = 0.0, 0.0, 0.0
    for number in range(len(prep.sources)):
        mine = [item for item in inputs if item.source == number and item.text_bytes]
        texts, share = _read_first(mine[0], prep, largest) if mine else ([], 0.0)
        if not texts:
            continue
        weight = sum(item.text_bytes for item in mine)
        sizes += weight
        documents += weight * len(texts) / share
        tokens += weight * _count_tokens(texts, prep, tokenizer) / share
    return Measured(sizes / tokens if tokens else 0.0, documents / sizes if sizes else 0.0)


def _read_first(item: Input, prep: PrepConfig, largest: int) -> tuple[list[str], float]:
    """The first documents of an input, and the bytes of text (as ``Input.text_bytes`` counts them) they stand for."""
    if item.kind == "hub":
        return [], 0.0
    try:
        block = next(Reader(item, prep.sources[item.source], 1 << 62).texts(0), None)
    except (SourceError, OSError) as error:
        if isinstance(error, SourceError) and error.exit_code == EXIT_USAGE:
            raise
        return [], 0.0
    if block is None or not block.texts:
        return [], 0.0
    ends = np.cumsum([len(text) for text in block.texts])
    count = max(1, int(np.searchsorted(ends, largest)))
    chosen = [text[:largest] for text in block.texts[:count]]
    return chosen, block.num_bytes * sum(map(len, chosen)) / float(ends[-1])


def _count_tokens(texts: list[str], prep: PrepConfig, tokenizer: Tokenizer | None) -> int:
    """Ids of the documents, framing and alignment included; 0 without a tokenizer."""
    if tokenizer is None:
        return 0
    lengths = np.diff(tokenizer.encode_documents(texts)[1])
    padded = -(-lengths // prep.alignment) * prep.alignment
    fits = (
        prep.packing == "aligned" and padded.sum() <= MOST_IDS
    )  # the packer refuses more, and says what to set
    return int((padded if fits else lengths).sum())


def _load_tokenizer(config: RunConfig) -> Tokenizer | None:
    """The run's tokenizer; ``None`` where there is none yet."""
    try:
        return load_tokenizer(config.tokenizer, config.tokenizer_path, verified=True)
    except (PrepError, OSError):
        return None
