"""Where the text comes from and how it becomes K-aligned token shards."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from calm_scale.config.section import NodePathText, PathText, Section

SPLITS = ("train", "autoencoder", "heldout")
"""What `prep` divides the documents into; each is a folder of its own."""


ENCODES = ("encoder", "add_bos", "add_eos", "bos_token", "eos_token", "pad_token")
"""The settings of a tokenizer that decide which ids a document becomes."""


class TokenizerConfig(Section):
    """The tokenizer shared by every stage of a run.

    ``path`` names a ``tokenizer.json`` (Hugging Face), a ``tokenizer.model`` (tiktoken ranks, as Llama 3
    ships it) or a folder holding either; ``None`` means ``<workdir>/tokenizer.json``. Special tokens are found
    by their usual names (``<|begin_of_text|>``, ``<s>``, …) unless named here. ``pad_token`` may name a token
    the tokenizer lacks: it then takes the next free id, as the paper's ``[PAD]`` = 128256 does.
    ``on_mismatch`` says what happens when a fast encoder disagrees with the reference encoder.
    """

    path: Path | None = None
    encoder: Literal["auto", "fastokens", "tiktoken", "tokenizers"] = "auto"
    add_bos: bool = True
    add_eos: bool = False
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    on_mismatch: Literal["stop", "fallback"] = "stop"


class SourceConfig(Section):
    """One source of documents: files, globs and folders, or a Hugging Face dataset."""

    paths: tuple[PathText, ...] = ()
    dataset: PathText | None = None
    split: str = "train"
    text_field: str = "text"
    include_sets: tuple[str, ...] = ()
    exclude_sets: tuple[str, ...] = ()
    weight: float = Field(default=1.0, gt=0)

    @property
    def label(self) -> str:
        """The source in a table or a message: its dataset or its paths."""
        return self.dataset or ", ".join(self.paths)

    @model_validator(mode="after")
    def _one_origin(self) -> SourceConfig:
        if bool(self.paths) == (self.dataset is not None):
            raise ValueError("a source names either `paths` (files, globs, folders) or one `dataset`")
        return self


class SplitConfig(Section):
    """Share of the documents, by a hash of their content, that goes to each use. The rest trains the LM."""

    heldout: float = Field(default=0.0, ge=0, le=1)
    autoencoder: float = Field(default=0.0, ge=0, lt=1)

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
    """How training and evaluation read prepared splits.

    ``stage_to`` names node-local storage (``$SLURM_TMPDIR/calm``, ``/local/scratch``): each node first copies its
    split there, once, every checksum checked. Without it ``check: full`` reads every shard once before the first
    step, the ranks sharing the work, ``headers`` only headers and sizes, and ``auto`` is full where that is at most
    4 GB a rank (some seconds).
    """

    stage_to: NodePathText | None = None
    check: Literal["auto", "headers", "full"] = "auto"


class PrepConfig(Section):
    """Text → token ids → packed sequences → shards and a manifest.

    ``workers`` counts processes when no MPI launcher is in charge. ``segment_megabytes`` is the unit of work
    in MB of text (one shard per split and segment); ``None`` derives it from the input's size alone, so the
    bytes written never depend on the number of workers. ``keep_tail`` names the splits whose last, incomplete
    sequence is stored too, filled up; the other splits leave it out, as the paper's packing does.
    ``on_unusable_input`` says what a source or a file without a usable record does: it stops the prep with the fields
    that were found, or is reported and left out.
    """

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    splits: SplitConfig = SplitConfig()
    sequence_length: int = Field(default=8192, gt=0)
    alignment: int = Field(default=8, gt=0)
    packing: Literal["concat", "aligned", "best-fit"] = "concat"
    keep_tail: tuple[Literal["train", "autoencoder", "heldout"], ...] = ("heldout",)
    dtype: Literal["auto", "uint16", "uint32"] = "auto"
    shard_megabytes: int = Field(default=256, gt=0)
    segment_megabytes: float | None = Field(default=None, gt=0)
    workers: int = Field(default=1, gt=0)
    deduplicate: bool = False
    max_bad_fraction: float = Field(default=0.001, ge=0, le=1)
    on_corrupt_file: Literal["stop", "quarantine"] = "stop"
    on_unusable_input: Literal["stop", "report"] = "stop"

    @model_validator(mode="after")
    def _aligned(self) -> PrepConfig:
        if self.sequence_length % self.alignment:
            raise ValueError(
                f"sequence_length {self.sequence_length} is not a multiple of alignment {self.alignment}"
            )
        return self
