"""The probe: texts on which encoders have been seen to differ, and the fingerprint of a tokenizer's behaviour."""

from __future__ import annotations

from functools import cache

import numpy as np
import xxhash

from data_prep.encoders import Encoder, TiktokenEncoder
from data_prep.errors import TokenizerError

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


def long_runs() -> tuple[str, ...]:
    """Runs of 1 MB, on which encoders have panicked, differed or taken minutes."""
    return ("a" * 1_000_000, " " * 1_000_000)


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


def verify(fast: Encoder, reference: Encoder, exact_on_runs: Encoder) -> None:
    """Refuse ``fast`` unless it equals ``reference`` on the probe and ``exact_on_runs`` on runs of 1 MB.

    Raises:
        TokenizerError: they differ; names the first text.
    """
    judges = [(reference, list(probe_texts()))]
    if isinstance(reference, TiktokenEncoder):
        judges.append((exact_on_runs, list(probe_texts())))
    judges.append((exact_on_runs, list(long_runs())))
    for judge, texts in judges:
        difference = first_difference(fast, judge, texts)
        if difference is not None:
            raise TokenizerError(
                f"{difference}. The ids would not be the tokenizer's: use tokenizer.encoder: {reference.name}, "
                "or tokenizer.on_mismatch: fallback"
            )
