"""What a prep will make of its inputs, measured on the first documents of each source, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from calm_scale.config import ConfigError, RunConfig
from calm_scale.config.data import PrepConfig
from data_prep.errors import PrepError, SourceError, SourceMistakeError
from data_prep.inputs import Input, list_inputs
from data_prep.packing import MOST_IDS
from data_prep.shards import token_dtype
from data_prep.sources import Reader
from data_prep.tokenizer import Tokenizer, load_tokenizer

BYTES_PER_TOKEN = 4.0
"""Where no tokenizer can be asked."""

BYTES_PER_SECOND = 60e6
"""Of text, one worker: an assumption."""

SHARD_OVERHEAD = 1.05
_SAMPLED_BYTES = 1_000_000
_LEAST_SAMPLED_BYTES = 32_000


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


def estimate(config: RunConfig) -> Estimate:
    """Look at the inputs of a run's prep; reads a few megabytes at most.

    Raises:
        ConfigError: there is no ``prep`` section.
        SourceError: an input is missing or cannot be read.
    """
    if config.prep is None:
        raise ConfigError(f"run {config.name}: there is no `prep` section")
    inputs = list_inputs(config.prep.sources)
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
        SourceMistakeError: a table has no such column.
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
    except SourceMistakeError:
        raise
    except (SourceError, OSError):
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
