"""What a prep will make of its inputs, from a look at the first documents: for plans before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from calm_scale.config import ConfigError, RunConfig
from data_prep.errors import PrepError
from data_prep.inputs import list_inputs
from data_prep.shards import token_dtype
from data_prep.sources import iterate_texts
from data_prep.tokenizer import load_tokenizer

BYTES_PER_TOKEN = 4.0
"""Where no tokenizer can be asked."""

BYTES_PER_SECOND = 60e6
"""Of text, one worker: an assumption."""

SHARD_OVERHEAD = 1.05
_SAMPLED_DOCUMENTS = 256
_SAMPLED_BYTES = 2_000_000


@dataclass(frozen=True)
class Estimate:
    """Sizes of a prep.

    Attributes:
        num_inputs: files (a dataset counts as one, its size is not known).
        stored_bytes: as they lie on disk.
        text_bytes: of text, uncompressed.
        num_documents: by the mean length of the first ones; 0 where none could be read.
        bytes_per_token: of the first documents under the run's tokenizer, else :data:`BYTES_PER_TOKEN`.
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
    first = next((item for item in inputs if not item.is_dataset), None)
    field = config.prep.sources[first.source].text_field if first is not None else ""
    documents = list(_first_documents(first.name, field)) if first is not None else []
    sampled = sum(len(document.encode()) for document in documents)
    tokens = _tokens(config, documents)
    return Estimate(
        num_inputs=len(inputs),
        stored_bytes=sum(item.size for item in inputs),
        text_bytes=text,
        num_documents=round(text * len(documents) / sampled) if sampled else 0,
        bytes_per_token=sampled / tokens if tokens else BYTES_PER_TOKEN,
        sampled=bool(tokens),
        bytes_per_id=token_dtype(config.vocab_size - 1, config.prep.dtype).itemsize,
    )


def _first_documents(name: str, text_field: str) -> Iterator[str]:
    size = 0
    for document in islice(iterate_texts([name], text_field), _SAMPLED_DOCUMENTS):
        yield document
        size += len(document)
        if size > _SAMPLED_BYTES:
            return


def _tokens(config: RunConfig, documents: list[str]) -> int:
    """Ids of the documents, framing included; 0 where there is no tokenizer yet."""
    if not documents:
        return 0
    try:
        tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_path, verified=True)
    except (PrepError, OSError):
        return 0
    return int(tokenizer.encode_documents(documents)[0].size)
