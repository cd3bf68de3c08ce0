"""The last, incomplete sequence of a split: stored where it is to be scored, never served as text where it is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from calm_scale.config import RunConfig
from data_prep.errors import PrepError, StarvedSplitError
from data_prep.prep import prepare
from data_prep.prep.megatron import export_megatron, import_megatron, open_megatron
from data_prep.prep.prep_report import verify_split
from data_prep.shards.compressed import compress_split
from data_prep.shards.manifest import Manifest
from data_prep.shards.reading import ShardDataset
from data_prep.tokenizer import load_tokenizer

MakeConfig = Callable[..., RunConfig]


def stream_of(dataset: ShardDataset) -> list[int]:
    return [int(token) for i in range(len(dataset)) for token in dataset[i]]


def expected_stream(config: RunConfig, texts: list[str]) -> list[int]:
    tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_path)
    return [i for text in texts for i in (tokenizer.bos_id, *tokenizer.encode(text))]


@pytest.mark.parametrize("tokens_per_sample", [64, 16, 8])
def test_a_kept_tail_is_read_to_the_last_token_and_no_further(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace, tokens_per_sample: int
) -> None:
    texts = kit.make_texts(30)
    config = make_config(kit.write_lines(tmp_path / "a.jsonl", texts), splits={"heldout": 1.0})
    prepare(config)
    folder = config.data_dir / "heldout"
    expected = expected_stream(config, texts)
    assert len(expected) % 64 % tokens_per_sample, "this test needs a partial sample"
    tokens = Manifest.read(folder).tokens
    assert (tokens.tail, tokens.padding) == (0, -len(expected) % 64)
    assert tokens.stored == len(expected) + tokens.padding
    assert stream_of(ShardDataset(folder, tokens_per_sample, partial=True)) == expected
    whole = ShardDataset(folder, tokens_per_sample)
    assert stream_of(whole) == expected[: len(expected) // tokens_per_sample * tokens_per_sample]
    rows = np.arange(len(whole))
    assert whole.gather(rows).ravel().tolist() == stream_of(whole)
    assert sorted(whole.order(0)(rows)) == rows.tolist()
    assert verify_split(folder).ok
    compress_split(folder)
    assert stream_of(ShardDataset(folder, tokens_per_sample, partial=True)) == expected


def test_each_source_keeps_its_own_tail_and_other_splits_drop_theirs(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace
) -> None:
    a = kit.write_lines(tmp_path / "a.jsonl", kit.make_texts(40, seed=1))
    b = kit.write_lines(tmp_path / "b.jsonl", kit.make_texts(40, seed=2))
    sources = [{"paths": [str(a)], "weight": 2.0}, {"paths": [str(b)]}]
    config = make_config([], sources=sources, splits={"heldout": 0.5}, segment_megabytes=0.002)
    prepare(config)
    heldout, train = (Manifest.read(config.data_dir / s) for s in ("heldout", "train"))
    assert [s.filler > 0 for s in heldout.shards if s.name.startswith("tail")] == [True, True]
    assert heldout.tokens.tail == 0
    assert heldout.served_padding == 0
    assert train.filler == 0
    assert train.tokens.tail > 0
    assert train.fingerprint != heldout.fingerprint
    partial = ShardDataset(config.data_dir / "heldout", 64, partial=True)
    counts = heldout.tokens
    assert len(stream_of(partial)) == counts.text + counts.bos + counts.boundaries
    whole = ShardDataset(config.data_dir / "heldout", 64)
    drawn = whole.order(3)(np.arange(len(whole)))
    assert set(np.unique(drawn)) <= set(range(len(whole)))
    everything = make_config(
        [], "all", sources=sources, splits={"heldout": 0.5}, keep_tail=["train", "heldout"]
    )
    prepare(everything)
    kept = Manifest.read(everything.data_dir / "train")
    assert kept.tokens.tail == 0
    assert kept.tokens.text == train.tokens.text


def test_a_tokenizer_without_padding_fills_up_too(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace, tokenizer_path: Path
) -> None:
    import json

    definition = json.loads(tokenizer_path.read_text())
    definition["added_tokens"] = []
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(definition))
    config = make_config(
        kit.write_lines(tmp_path / "a.jsonl", ["a b c d e f g"] * 30),
        tokenizer={"path": str(bare), "add_bos": False},
        splits={"heldout": 1.0},
    )
    prepare(config)
    folder = config.data_dir / "heldout"
    manifest = Manifest.read(folder)
    assert (manifest.pad_id, manifest.bos_id, manifest.eos_id) == (None, None, None)
    assert manifest.filler > 0
    assert len(stream_of(ShardDataset(folder, 64, partial=True))) == manifest.tokens.text
    assert verify_split(folder).ok


def test_only_a_text_of_its_own_may_be_shorter_than_a_sequence(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace
) -> None:
    path = kit.write_lines(tmp_path / "a.jsonl", kit.make_texts(60))
    alone = make_config(path, "alone", splits={"heldout": 1.0}, sequence_length=65536)
    prepare(alone)
    (only,) = [ShardDataset(alone.data_dir / "heldout", 65536, partial=True)[i] for i in range(1)]
    assert only.tolist() == expected_stream(alone, kit.make_texts(60))
    assert len(ShardDataset(alone.data_dir / "heldout", 65536)) == 0
    shared = make_config(path, "shared", splits={"heldout": 0.05}, sequence_length=1024)
    with pytest.raises(StarvedSplitError, match=r"splits\.heldout = 0\.05.*smallest share"):
        prepare(shared)


def test_a_kept_tail_survives_megatrons_format(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace
) -> None:
    texts = kit.make_texts(30)
    config = make_config(kit.write_lines(tmp_path / "a.jsonl", texts), splits={"heldout": 1.0})
    prepare(config)
    export_megatron(config.data_dir / "heldout", tmp_path / "pair")
    assert open_megatron(tmp_path / "pair").tokens.tolist() == expected_stream(config, texts)
    tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_path)
    other = tmp_path / "back"
    import_megatron(tmp_path / "pair", other, tokenizer, config.prep, vocab_size=400, split="heldout")
    dataset = ShardDataset(other / "heldout", 64, partial=True)
    assert stream_of(dataset) == expected_stream(config, texts)
    assert verify_split(other / "heldout").ok


@pytest.mark.parametrize(
    "settings",
    [
        {"splits": {"heldout": 1.0}},
        {"packing": "aligned", "splits": {"heldout": 1.0}},
        {"packing": "aligned", "alignment": 8 << 30},
        {"packing": "best-fit"},
        {"packing": "best-fit", "alignment": 8 << 30},
    ],
    ids=str,
)
def test_a_sequence_length_that_no_memory_holds_is_a_mistake(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace, settings: dict[str, Any]
) -> None:
    path = kit.write_lines(tmp_path / "a.jsonl", kit.make_texts(30))
    with pytest.raises(
        PrepError, match=r"lower prep\.sequence_length", check=lambda error: error.exit_code == 2
    ):
        prepare(make_config(path, sequence_length=8 << 30, **settings))
    assert not list((tmp_path / "run/data").glob("*/*.shard*"))


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.95])
def test_one_document_is_too_few_for_two_splits_whatever_the_share(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace, share: float
) -> None:
    path = kit.write_lines(tmp_path / "a.jsonl", ["the energy of a patch " * 400])
    config = make_config(path, splits={"heldout": share}, sequence_length=128)
    with pytest.raises(StarvedSplitError, match=r"too few documents \(1\)"):
        prepare(config)


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
@pytest.mark.parametrize("split", ["heldout", "autoencoder"])
def test_the_advised_share_works(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace, seed: int, split: str
) -> None:
    path = kit.write_lines(tmp_path / "a.jsonl", kit.make_texts(300, seed=seed))
    settings = {"sequence_length": 1024, "keep_tail": []}
    with pytest.raises(StarvedSplitError) as refused:
        prepare(make_config(path, splits={split: 0.004}, **settings))
    advised = float(str(refused.value).rsplit(" ", 1)[1])
    assert 0.004 < advised < 0.5
    prepare(make_config(path, splits={split: advised}, **settings))


def test_too_little_left_for_training_is_told_of_training(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace
) -> None:
    path = kit.write_lines(tmp_path / "a.jsonl", kit.make_texts(300))
    config = make_config(path, splits={"heldout": 0.996}, sequence_length=1024)
    with pytest.raises(StarvedSplitError, match=r"the other splits leave too little.*'train'.*about 0\.\d+"):
        prepare(config)
