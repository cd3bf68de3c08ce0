"""Padding and documents of a split survive Megatron's format, which cannot say them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from calm_scale.config import RunConfig
from data_prep.prep import prepare
from data_prep.prep.megatron import PADDING_UNKNOWN, export_megatron, import_megatron
from data_prep.shards.manifest import Manifest
from data_prep.tokenizer import load_tokenizer


@pytest.mark.parametrize("packing", ["best-fit", "aligned"])
def test_counts_survive_a_round_trip(
    tmp_path: Path, make_config: Callable[..., RunConfig], kit: SimpleNamespace, packing: str
) -> None:
    path = kit.write_lines(tmp_path / "in.jsonl", kit.make_texts(60))
    config = make_config(path, packing=packing)
    prepare(config)
    before = Manifest.read(config.data_dir / "train")
    assert before.tokens.padding
    pair = tmp_path / "pair"
    export_megatron(config.data_dir / "train", pair)
    tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_path)
    assert config.prep is not None

    def imported(name: str) -> Manifest:
        assert config.prep is not None
        return import_megatron(pair, tmp_path / name, tokenizer, config.prep, vocab_size=400)

    after = imported("back")
    assert after.documents.kept == before.documents.kept
    assert after.length_histogram == before.length_histogram
    assert after.tokens.closes()
    assert not after.notes
    left_out = before.tokens.tail
    for kind in ("text", "bos", "eos", "padding"):
        was, now = getattr(before.tokens, kind), getattr(after.tokens, kind)
        assert was - left_out <= now <= was
    assert after.tokens.padding
    pair.with_name("pair.counts.json").rename(tmp_path / "away")
    foreign = imported("foreign")
    assert foreign.notes == {PADDING_UNKNOWN: 1}
    assert foreign.tokens.padding == 0
    (tmp_path / "away").rename(pair.with_name("pair.counts.json"))
    ids = bytearray(pair.with_name("pair.bin").read_bytes())
    ids[:2], ids[2:4] = ids[2:4], ids[:2]
    pair.with_name("pair.bin").write_bytes(ids)
    assert imported("changed").notes == {PADDING_UNKNOWN: 1}  # the counts are another pair's
