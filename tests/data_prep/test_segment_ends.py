"""Where the ends of segments are joined, documents stay apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from calm_scale.config import RunConfig
from data_prep.prep import prepare
from data_prep.prep.prep_report import verify_split, verify_tree
from data_prep.shards.manifest import Manifest
from data_prep.shards.reading import ShardDataset
from data_prep.tokenizer import load_tokenizer

MakeConfig = Callable[..., RunConfig]


def pieces_of(config: RunConfig, shard: str) -> list[list[int]]:
    """The ids of the sequences of one shard, cut before each BOS; its padding left out."""
    folder = config.data_dir / "train"
    manifest = Manifest.read(folder)
    dataset = ShardDataset(folder, manifest.sequence_length, partial=True)
    pieces: list[list[int]] = [[]]
    for i in range(len(dataset)):
        if dataset.shard_of(i).name == shard:
            for token in dataset[i].tolist():
                if token == manifest.bos_id:
                    pieces.append([])
                elif token != manifest.pad_id:
                    pieces[-1].append(token)
    return [piece for piece in pieces if piece]


@pytest.mark.parametrize("packing", ["concat", "aligned"])
def test_no_stretch_of_a_tail_shard_holds_pieces_of_two_documents(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace, packing: str
) -> None:
    texts = kit.make_texts(150, words=200)
    config = make_config(
        kit.write_lines(tmp_path / "a.jsonl", texts),
        packing=packing,
        sequence_length=512,
        segment_megabytes=0.01,
        keep_tail=["train"],
    )
    prepare(config)
    tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_path)
    documents = [" ".join(map(str, ids)) for ids in tokenizer.encode_batch(texts)]
    pieces = pieces_of(config, "tail-000000.shard")
    assert len(pieces) > 20
    strange = [p for p in pieces if not any(" ".join(map(str, p)) in document for document in documents)]
    assert not strange
    manifest = Manifest.read(config.data_dir / "train")
    assert manifest.tokens.boundaries > 5
    assert manifest.tokens.bos == 150
    assert manifest.tokens.text == sum(map(len, tokenizer.encode_batch(texts)))
    assert all(one.ok for one in verify_tree(config.data_dir))


@pytest.mark.parametrize(
    "framing", [{"add_eos": True}, {"add_bos": False, "add_eos": True}, {"add_bos": False}], ids=str
)
def test_nothing_is_put_in_where_eos_ends_documents_or_nothing_separates_them(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace, framing: dict[str, Any]
) -> None:
    path = kit.write_lines(tmp_path / "a.jsonl", kit.make_texts(60, words=100))
    config = make_config(path, tokenizer=framing, sequence_length=256, segment_megabytes=0.01)
    prepare(config)
    assert Manifest.read(config.data_dir / "train").tokens.boundaries == 0
    assert verify_split(config.data_dir / "train").ok


def test_a_split_of_the_format_before_boundaries_is_still_read(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace
) -> None:
    config = make_config(kit.write_lines(tmp_path / "a.jsonl", kit.make_texts(60)))
    prepare(config)
    path = config.data_dir / "train/manifest.json"
    before = path.read_text()
    path.write_text(before.replace('  "boundaries": 0,\n', ""))
    assert path.read_text() != before
    assert Manifest.read(config.data_dir / "train").tokens.boundaries == 0
    whole = config.data_dir / "manifest.json"
    whole.write_text(whole.read_text().replace('  "boundaries": 0,\n', ""))
    assert all(one.ok for one in verify_tree(config.data_dir))
    assert prepare(config).already_done
