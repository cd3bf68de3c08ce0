"""The tokenizer of a run: one definition, a verified encoder, exact decoding, and a fingerprint of behaviour."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from calm_scale.config.data import TokenizerConfig
from data_prep.errors import EncoderMismatchError, TokenizerError
from data_prep.tokenizer.definition import TokenizerSpec, read_spec
from data_prep.tokenizer.encoders import (
    Encoder,
    Flat,
    TokenizersEncoder,
    build_encoder,
    fingerprint,
    first_difference,
    probe_texts,
)


class Tokenizer:
    """Text ↔ ids. ``encode`` adds no special tokens; ``encode_documents`` frames each text by the BOS/EOS policy.

    Attributes:
        vocab_size: largest id + 1, special and padding tokens included.
        bos_id, eos_id, pad_id: ``None`` where the tokenizer has none.
        encoder_name: the encoder in use.
        warning: why a fast encoder was set aside, if it was.
    """

    def __init__(self, spec: TokenizerSpec, encoder: Encoder, warning: str | None = None) -> None:
        self._spec, self._encoder = spec, encoder
        self.name, self.max_id, self.vocab_size = spec.name, spec.max_id, spec.max_id + 1
        self.bos_id, self.eos_id, self.pad_id = spec.bos_id, spec.eos_id, spec.pad_id
        self.add_bos, self.add_eos = spec.add_bos, spec.add_eos
        self.encoder_name, self.warning = encoder.name, warning

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without BOS or EOS; literal special strings are ordinary text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without BOS or EOS."""
        ids, offsets = self._encoder.encode_flat(texts, framed=False)
        return [ids[offsets[i] : offsets[i + 1]].tolist() for i in range(len(texts))]

    @property
    def before_document(self) -> tuple[int, ...]:
        """Ids that the BOS policy puts before each document, and so before a prompt or a text to score."""
        return (self.bos_id,) if self.add_bos and self.bos_id is not None else ()

    @property
    def boundary_id(self) -> int | None:
        """The id between a document and the one before it: BOS or EOS by the policy, ``None`` without either."""
        return self.bos_id if self.add_bos else self.eos_id if self.add_eos else None

    def encode_documents(self, texts: list[str]) -> Flat:
        """Framed documents as one flat array: (ids uint32 [n], offsets int64 [len(texts) + 1])."""
        return self._encoder.encode_flat(texts, framed=True)

    def decode(self, ids: list[int]) -> str:
        """Text of ``ids``; special tokens show as their names, the padding id outside the vocabulary as nothing."""
        known = [i for i in ids if i != self.pad_id or i in self._special_ids]
        text: str = self.reference._native.decode(known, skip_special_tokens=False)
        return text

    @cached_property
    def reference(self) -> TokenizersEncoder:
        """The reference encoder of a tokenizer.json (also decodes)."""
        return TokenizersEncoder(self._spec.json)

    @property
    def reference_name(self) -> str:
        """The encoder that says what is right: tiktoken for its ranks, ``tokenizers`` otherwise."""
        return _name_reference(self._spec)

    def check(self, texts: Sequence[str]) -> None:
        """Compare a fast encoder with the reference on ``texts``.

        Raises:
            EncoderMismatchError: the ids differ.
        """
        if self.encoder_name == self.reference_name:
            return
        difference = first_difference(self._encoder, self._judge, list(texts))
        if difference is not None:
            raise EncoderMismatchError(
                f"{difference}. Set tokenizer.encoder: {self.reference_name}, or tokenizer.on_mismatch: fallback",
                self.reference_name,
            )

    @cached_property
    def _judge(self) -> Encoder:
        return build_encoder("tiktoken", self._spec) if self.reference_name == "tiktoken" else self.reference

    @property
    def portable_encoder(self) -> str:
        """The ``tokenizer.encoder`` that gives these ids again: auto for a fast encoder, which equals its reference,
        so that a machine without it can read the data; the encoder's name otherwise."""
        return "auto" if self.encoder_name == "fastokens" else self.encoder_name

    @cached_property
    def _special_ids(self) -> set[int]:
        return set(self._spec.specials.values())

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the ids on a fixed probe and of the special ids: what the tokenizer does, not its name."""
        return fingerprint(self._encoder, (self.bos_id, self.eos_id, self.pad_id))


def load_tokenizer(config: TokenizerConfig, path: Path, *, verified: bool = False) -> Tokenizer:
    """Load the tokenizer at ``path`` (file or folder) with the encoder the config asks for.

    A fast encoder is used only where it gives the reference's ids on the probe. ``verified`` skips that (a worker whose
    parent did it).

    Raises:
        TokenizerError: no tokenizer there, or the encoders differ and ``on_mismatch`` is stop.
    """
    spec = read_spec(config, Path(path))
    reference = _name_reference(spec)
    wanted = config.encoder
    if wanted == "auto":
        wanted = "fastokens" if find_spec("fastokens") else "tokenizers"
    if wanted in (reference, "tokenizers"):
        return Tokenizer(spec, build_encoder(wanted, spec))
    try:
        tokenizer = Tokenizer(spec, build_encoder(wanted, spec))
        if not verified:
            tokenizer.check(probe_texts())
        return tokenizer
    except TokenizerError as error:
        is_refused = config.encoder != "auto" or isinstance(error, EncoderMismatchError)
        if config.on_mismatch == "stop" and is_refused:
            raise
        return Tokenizer(spec, build_encoder(reference, spec), warning=str(error))


def _name_reference(spec: TokenizerSpec) -> str:
    return "tiktoken" if spec.has_ranks and find_spec("tiktoken") else "tokenizers"
