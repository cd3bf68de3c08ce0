"""Texts handed over as JSON lines: whole, or refused with file and line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from calm_scale.config import ConfigError
from calm_scale.stages.texts import given_texts, read_texts


def test_texts_are_read_in_order_whatever_they_hold(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "a\u2028b"}\n\n{"prompt": ""}\n{"prompt": "\\ud83c\\udf89"}', encoding="utf-8"
    )
    assert read_texts(path, "prompt") == ["a\u2028b", "", "🎉"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"prompt": "a"}\nnot json\n', r"prompts\.jsonl:2: expected a JSON object"),
        (b'{"prompt": 3}', r"prompts\.jsonl:1: expected a JSON object"),
        (b'{"prompt": "x\\ud800y"}', r"prompts\.jsonl:1: half a surrogate pair"),
        (b"[" * 100_000, r"prompts\.jsonl:1: expected a JSON object"),
        (b"\xff\xfe", "cannot be read"),
        (b"\n", "holds no prompt"),
    ],
)
def test_what_is_no_text_is_refused_with_its_place(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_texts(path, "prompt")


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "b"}\r\n')
    assert given_texts(["a"], path, "prompt") == ["a", "b"]


def test_an_option_that_is_not_utf8_is_refused() -> None:
    text = os.fsdecode(b"a\xff\xfe")
    with pytest.raises(ConfigError, match=r"--prompt: the byte 0xff is not UTF-8"):
        given_texts([text], None, "prompt")
