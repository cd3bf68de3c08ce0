"""Where the text comes from and how it becomes K-aligned token shards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from calm_scale.config.section import (
    DECIDES_THE_SHARDS,
    SAFE,
    NodePathText,
    PathText,
    Section,
)

SPLITS = ("train", "autoencoder", "heldout")
"""What `prep` divides the documents into; each is a folder of its own."""


ENCODES = ("encoder", "add_bos", "add_eos", "bos_token", "eos_token", "pad_token")
"""The settings of a tokenizer that decide which ids a document becomes."""


class TokenizerConfig(Section):
    """The tokenizer shared by every stage of a run.

    ``path`` names a ``tokenizer.json`` (Hugging Face), a ``tokenizer.model`` (tiktoken ranks, as Llama 3 ships it) or
    a folder holding either. Special tokens are found by their usual names (``<|begin_of_text|>``, ``<s>``, …) unless
    named here.
    """

    path: Annotated[Path | None, DECIDES_THE_SHARDS] = None
    """A tokenizer.json, a tokenizer.model or a folder with either; null is `tokenizer.json` in the run's folder."""
    encoder: Annotated[Literal["auto", "fastokens", "tiktoken", "tokenizers"], SAFE] = "auto"
    """The library that encodes; all give the same ids."""
    add_bos: Annotated[bool, DECIDES_THE_SHARDS] = True
    """Begin each document with the BOS token."""
    add_eos: Annotated[bool, DECIDES_THE_SHARDS] = False
    """End each document with the EOS token."""
    bos_token: Annotated[str | None, DECIDES_THE_SHARDS] = None
    """Text of the BOS token; null finds it by its usual names."""
    eos_token: Annotated[str | None, DECIDES_THE_SHARDS] = None
    """Text of the EOS token; null finds it by its usual names."""
    pad_token: Annotated[str | None, DECIDES_THE_SHARDS] = None
    """Text of the padding token; one that the tokenizer lacks takes the next free id (the paper's `[PAD]`)."""
    on_mismatch: Annotated[Literal["stop", "fallback"], SAFE] = "stop"
    """Where a fast encoder disagrees with the reference encoder: stop, or use the reference."""


class SourceConfig(Section):
    """One source of documents: files, globs and folders, or a Hugging Face dataset."""

    field_policy = DECIDES_THE_SHARDS

    paths: tuple[PathText, ...] = ()
    """Files, globs and folders."""
    kind: str | None = None
    """How the files of `paths` are read: by extension, or by a reader of yours, `package.module:function`."""
    dataset: PathText | None = None
    """A dataset on the hub or saved on disk, instead of `paths`."""
    split: str = "train"
    """The split of `dataset`."""
    text_field: str = "text"
    """The field of a record that holds the text."""
    include_sets: tuple[str, ...] = ()
    """Sets of the Pile (`meta.pile_set_name`) that are taken; empty takes all."""
    exclude_sets: tuple[str, ...] = ()
    """Sets of the Pile that are left out."""
    weight: Annotated[float, SAFE] = Field(default=1.0, gt=0)
    """Factor of the source's natural share in the order of training; nothing is stored twice."""

    @property
    def label(self) -> str:
        """The source in a table or a message: its dataset or its paths."""
        return self.dataset or ", ".join(self.paths)

    @model_validator(mode="after")
    def _one_origin(self) -> SourceConfig:
        if bool(self.paths) == (self.dataset is not None):
            raise ValueError("a source names either `paths` (files, globs, folders) or one `dataset`")
        if self.kind is not None and self.dataset is not None:
            raise ValueError("`kind` names a reader of the files of `paths`; take it out beside `dataset`")
        return self


class SplitConfig(Section):
    """Share of the documents, by a hash of their content, that goes to each use. The rest trains the LM."""

    field_policy = DECIDES_THE_SHARDS

    heldout: float = Field(default=0.0, ge=0, le=1)
    """Share of the documents kept for evaluation."""
    autoencoder: float = Field(default=0.0, ge=0, lt=1)
    """Share of the documents kept for the autoencoder alone."""

    @model_validator(mode="after")
    def _leaves_something(self) -> SplitConfig:
        if self.heldout + self.autoencoder >= 1 and self.heldout != 1:
            raise ValueError("heldout + autoencoder must leave a share for the language model")
        return self

    def share(self, split: str) -> float:
        """Share of the documents that a split gets; ``train`` gets the rest."""
        named = {"heldout": self.heldout, "autoencoder": self.autoencoder}
        return named.get(split, 1 - self.heldout - self.autoencoder)


class ReadingConfig(Section):
    """How training and evaluation read prepared splits."""

    field_policy = SAFE

    stage_to: NodePathText | None = None
    """A folder on each node (`$SLURM_TMPDIR/calm`) to which a split is first copied, every checksum checked."""
    check: Literal["auto", "headers", "full"] = "auto"
    """Before the first step, read only headers or every shard; `auto` reads all up to 4 GB a rank."""


class PrepConfig(Section):
    """Text → token ids → packed sequences → shards and a manifest."""

    field_policy = DECIDES_THE_SHARDS

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    """Where the documents come from."""
    splits: SplitConfig = SplitConfig()
    """Shares of the documents for evaluation and for the autoencoder."""
    sequence_length: int = Field(default=8192, gt=0)
    """Tokens of a packed sequence."""
    alignment: int = Field(default=8, gt=0)
    """Tokens to which the beginning of a document is aligned; a multiple of every K that the shards serve."""
    packing: Literal["concat", "aligned", "best-fit"] = "concat"
    """Documents end to end (the paper), each from a multiple of `alignment`, or whole ones where they fit best."""
    keep_tail: tuple[Literal["train", "autoencoder", "heldout"], ...] = ("heldout",)
    """Splits whose last, incomplete sequence is stored too, filled up; the paper leaves it out."""
    dtype: Literal["auto", "uint16", "uint32"] = "auto"
    """Number type of the ids; `auto` takes the narrowest that holds them."""
    shard_megabytes: int = Field(default=256, gt=0)
    """Largest size of a shard in MB."""
    segment_megabytes: float | None = Field(default=None, gt=0)
    """Unit of work in MB of text, one shard a split and segment; null follows from the input's size alone."""
    workers: Annotated[int, SAFE] = Field(default=1, gt=0)
    """Processes, where no MPI launcher started several."""
    deduplicate: bool = False
    """Leave out documents whose text was there before."""
    max_bad_fraction: Annotated[float, SAFE] = Field(default=0.001, ge=0, le=1)
    """Share of bad records above which prep fails."""
    on_corrupt_file: Literal["stop", "quarantine"] = "stop"
    """At a damaged file: stop, or leave it out and report it."""
    on_unusable_input: Annotated[Literal["stop", "report"], SAFE] = "stop"
    """At a source or file without a usable record: stop with the fields found, or report and leave it out."""

    @model_validator(mode="after")
    def _aligned(self) -> PrepConfig:
        if self.sequence_length % self.alignment:
            raise ValueError(
                f"sequence_length {self.sequence_length} is not a multiple of alignment {self.alignment}"
            )
        return self
