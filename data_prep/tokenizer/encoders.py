"""The encoders behind one small interface: texts in, one flat array of framed ids out; and the probe that compares
them.

All treat literal special strings (``<|end_of_text|>`` written in a text) as ordinary text; BOS and EOS are
put around each document by the run's policy alone.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from data_prep.errors import TokenizerError
from data_prep.tokenizer.definition import LLAMA3_PATTERN, TokenizerSpec

PROBE_VERSION = 1
_HAND_PICKED = (
    "",
    " ",
    "\n",
    "Hello, world!",
    " leading and trailing ",
    "don't DON'T we'LL they've I'd it's \u2019s o'clock ''s",
    "1 12 123 1234 12345 3.14159 1,000,000 0x1F ½ ² ٣٤٥ 一二三",
    "def f(x):\n\treturn {'a': x**2}  # ok\n\n\nclass A:\n    pass\r\n\r\n",
    "<|begin_of_text|> <|end_of_text|><|pad|></s><s>[PAD]<|reserved_special_token_0|>",
    "e\u0301 é \u00df \u1e9e \ufb01 \u0130 \u0131 ſ K Å",
    "\u200b\u200d\ufeff\u00a0\u2003\u3000\u2028\u2029\u0085 x",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 ☃️",
    "नमस्ते สวัสดี 안녕하세요 こんにちは 你好 مرحبا שלום Γειά",
    "a\x00b\x01\x7f\x80\x9f",
    "https://example.org/a?b=c&d=%20#e user@example.org C:\\x\\y",
    "\t\t  \n  \n\t x   y\n \n",
)


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
            raise TokenizerError(
                f"the encoder tokenizers cannot encode a text with this tokenizer: {error}", mistake=True
            ) from None
        return _flatten([np.asarray(e.ids, np.uint32) for e in encoded])


class TiktokenEncoder:
    """tiktoken: the reference for tiktoken ranks. What it fails on (very long runs) ``tokenizers`` encodes."""

    name = "tiktoken"

    def __init__(self, spec: TokenizerSpec) -> None:
        if not spec.has_ranks:
            raise TokenizerError(
                f"tokenizer.encoder is tiktoken, but {spec.name} holds no tiktoken ranks; use encoder: auto",
                mistake=True,
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
        TokenizerError: it is not installed, or cannot represent this tokenizer.
    """
    try:
        if name == "tiktoken":
            return TiktokenEncoder(spec)
        if name == "fastokens":
            return FastokensEncoder(spec.json)
        return TokenizersEncoder(spec.json)
    except ImportError:
        raise TokenizerError(
            f"the encoder {name} is not installed; use tokenizer.encoder: auto", mistake=True
        ) from None
    except TokenizerError:
        raise
    except Exception as error:  # the encoders' own errors share no base class
        raise TokenizerError(f"the encoder {name} cannot load {spec.name}: {error}", mistake=True) from None


def _flatten(pieces: list[NDArray[np.uint32]]) -> Flat:
    offsets = np.zeros(len(pieces) + 1, np.int64)
    np.cumsum([len(piece) for piece in pieces], out=offsets[1:])
    return (np.concatenate(pieces) if pieces else np.empty(0, np.uint32)), offsets


@cache
def probe_texts() -> tuple[str, ...]:
    """About 250 kB: code points of every block alone and beside letters, digits and spaces; runs of many lengths.

    Built from fixed code points, not from Python's Unicode tables, so the fingerprint outlives an upgrade.
    """
    codes = [*range(0x3400), *range(0x3400, 0x30000, 23), *range(0xE0000, 0xE01F0, 5), 0xF0000, 0x10FFFD]
    characters = [chr(code) for code in codes if not 0xD800 <= code < 0xE000]
    texts = list(_HAND_PICKED)
    for start in range(0, len(characters), 128):
        some = characters[start : start + 128]
        texts += ["".join(some), " ".join(some), "a".join(some[::3]), "1" + "\n".join(some[::5]) + "'s"]
    for unit in ("a", " ", "\n", "\t", "9", "=", "é", "字", "ab", " \n", "\r\n", "a "):
        texts += [unit * count for count in (2, 3, 5, 17, 64, 1025)]
    return tuple(texts)


def fingerprint(encoder: Encoder, ids: tuple[int | None, ...]) -> str:
    """Hex digest of what the tokenizer does: its ids on the probe, and its special ids (bos, eos, pad)."""
    flat, offsets = encoder.encode_flat(list(probe_texts()), framed=True)
    digest = xxhash.xxh3_128(f"{PROBE_VERSION} {ids}".encode())
    digest.update(np.ascontiguousarray(flat, "<u4").tobytes())
    digest.update(np.ascontiguousarray(offsets, "<i8").tobytes())
    return digest.hexdigest()


def first_difference(fast: Encoder, reference: Encoder, texts: list[str]) -> str | None:
    """``None`` when both encoders give the same framed ids for every text; else a description of the first
    text on which they differ."""
    a, a_offsets = fast.encode_flat(texts, framed=True)
    b, b_offsets = reference.encode_flat(texts, framed=True)
    if np.array_equal(a_offsets, b_offsets) and np.array_equal(a, b):
        return None
    for i, text in enumerate(texts):
        left, right = a[a_offsets[i] : a_offsets[i + 1]], b[b_offsets[i] : b_offsets[i + 1]]
        if not np.array_equal(left, right):
            shown = text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"
            shortest = min(len(left), len(right))
            at = next((j for j in range(shortest) if left[j] != right[j]), shortest)
            return (
                f"{fast.name} and {reference.name} differ on {shown!r} from id {at} on: "
                f"…{left[at : at + 6].tolist()} of {len(left)} against …{right[at : at + 6].tolist()} of {len(right)}"
            )
    return f"{fast.name} and {reference.name} split a batch differently"
