"""The encoders behind one small interface: texts in, one flat array of framed ids out.

All treat literal special strings (``<|end_of_text|>`` written in a text) as ordinary text; BOS and EOS are
put around each document by the run's policy alone.
"""

from __future__ import annotations

import os
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import TokenizerMistakeError
from data_prep.tokenizer_spec import LLAMA3_PATTERN, TokenizerSpec

Flat = tuple[NDArray[np.uint32], NDArray[np.int64]]


class Encoder(Protocol):
    """Texts → (ids uint32 [n], offsets int64 [len(texts) + 1]); document i is ids[offsets[i]:offsets[i+1]]."""

    name: str

    def encode_flat(self, texts: list[str], *, framed: bool) -> Flat:
        """Encode; ``framed`` puts the policy's BOS/EOS around each document."""
        ...


class FastokensEncoder:
    """The fast one: no Python object per token; one thread per process, because every core has a process."""

    name = "fastokens"

    def __init__(self, definition: str) -> None:
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
        import fastokens

        self._native = fastokens.Tokenizer.from_json_str(definition)

    def encode_flat(self, texts: list[str], *, framed: bool) -> Flat:
        """See ``Encoder``."""
        ids, offsets = self._native.encode_batch_flat(
            texts, add_special_tokens=framed, split_special_tokens=True
        )
        return np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.int64)


class TokenizersEncoder:
    """Hugging Face ``tokenizers``: the reference for every tokenizer.json."""

    name = "tokenizers"

    def __init__(self, definition: str) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer

        self._native = Tokenizer.from_str(definition)
        self._native.encode_special_tokens = True

    def encode_flat(self, texts: list[str], *, framed: bool) -> Flat:
        """See ``Encoder``."""
        try:
            encoded = self._native.encode_batch_fast(texts, add_special_tokens=framed)
        except (
            Exception
        ) as error:  # of a definition that loads and cannot encode: the library has no class for it
            raise TokenizerMistakeError(
                f"the encoder tokenizers cannot encode a text with this tokenizer: {error}"
            ) from None
        return _flatten([np.asarray(e.ids, np.uint32) for e in encoded])


class TiktokenEncoder:
    """tiktoken: the reference for tiktoken ranks. What it fails on (very long runs) ``tokenizers`` encodes."""

    name = "tiktoken"

    def __init__(self, spec: TokenizerSpec) -> None:
        if not spec.has_ranks:
            raise TokenizerMistakeError(
                f"tokenizer.encoder is tiktoken, but {spec.name} holds no tiktoken ranks; use encoder: auto"
            )
        import tiktoken

        self._native = tiktoken.Encoding(
            spec.name, pat_str=LLAMA3_PATTERN, mergeable_ranks=spec.ranks, special_tokens=spec.specials
        )
        self._before = np.array([spec.bos_id] if spec.add_bos else [], np.uint32)
        self._after = np.array([spec.eos_id] if spec.add_eos else [], np.uint32)
        self._spec = spec
        self._rescue: Encoder | None = None

    def encode_flat(self, texts: list[str], *, framed: bool) -> Flat:
        """See ``Encoder``."""
        framing = [piece for piece in (self._before, self._after) if framed and len(piece)]
        pieces = [self._one(text) for text in texts]
        if not framing:
            return _flatten(pieces)
        offsets = np.zeros(len(texts) + 1, np.int64)
        np.cumsum([len(piece) + len(framing) for piece in pieces], out=offsets[1:])
        wrapped = [part for piece in pieces for part in (self._before, piece, self._after)]
        return (np.concatenate(wrapped) if wrapped else np.empty(0, np.uint32)), offsets

    def _one(self, text: str) -> NDArray[np.uint32]:
        try:
            ids: NDArray[np.uint32] = self._native.encode_to_numpy(text, disallowed_special=())
        except BaseException as failure:
            # Runs of a million spaces exhaust its regex: a Rust panic in older versions, a ValueError in newer.
            if not isinstance(failure, ValueError) and type(failure).__name__ != "PanicException":
                raise
            if self._rescue is None:
                self._rescue = TokenizersEncoder(self._spec.json)
            ids = self._rescue.encode_flat([text], framed=False)[0]
        return ids


def build_encoder(name: str, spec: TokenizerSpec) -> Encoder:
    """The encoder called ``name`` for this tokenizer.

    Raises:
        TokenizerMistakeError: it is not installed, or cannot represent this tokenizer.
    """
    try:
        if name == "tiktoken":
            return TiktokenEncoder(spec)
        if name == "fastokens":
            return FastokensEncoder(spec.json)
        return TokenizersEncoder(spec.json)
    except ImportError:
        raise TokenizerMistakeError(
            f"the encoder {name} is not installed; use tokenizer.encoder: auto"
        ) from None
    except TokenizerMistakeError:
        raise
    except Exception as error:  # the encoders' own errors share no base class
        raise TokenizerMistakeError(f"the encoder {name} cannot load {spec.name}: {error}") from None


def _flatten(pieces: list[NDArray[np.uint32]]) -> Flat:
    offsets = np.zeros(len(pieces) + 1, np.int64)
    np.cumsum([len(piece) for piece in pieces], out=offsets[1:])
    return (np.concatenate(pieces) if pieces else np.empty(0, np.uint32)), offsets
