"""Reading, verifying, compressing, staging and exchanging prepared splits."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from calm_scale.config import RunConfig
from calm_scale.stages.prep import verify_shards
from calm_scale.stages.prep_display import draw_lengths, show_split
from data_prep.errors import ShardError
from data_prep.prefetch import read_ahead
from data_prep.prep import prepare
from data_prep.prep.megatron import export_megatron, import_megatron, open_megatron
from data_prep.prep.prep_report import (
    load_split_tokenizer,
    read_sequence,
    verify_split,
    verify_tree,
)
from data_prep.shards import HEADER_BYTES
from data_prep.shards.compressed import compress_split, expand_split
from data_prep.shards.manifest import Manifest
from data_prep.shards.reading import ShardDataset
from data_prep.shards.staging import stage_split
from data_prep.tokenizer import load_tokenizer

MakeConfig = Callable[..., RunConfig]


@pytest.fixture
def prepared(tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace) -> RunConfig:
    """A run with a few shards of 64-token sequences."""
    path = kit.write_lines(tmp_path / "in.jsonl.zst", kit.make_texts(200))
    config = make_config(path, segment_megabytes=0.02, splits={"heldout": 0.1})
    prepare(config)
    return config


def everything(split: Path, tokens: int = 64) -> np.ndarray:
    dataset = ShardDataset(split, tokens)
    return np.stack([dataset[i] for i in range(len(dataset))])


@pytest.mark.parametrize("tokens", [64, 32, 8])
def test_samples_are_read_only_views_in_stored_order(prepared: RunConfig, tokens: int) -> None:
    dataset = ShardDataset(prepared.data_dir / "train", tokens)
    assert len(dataset.manifest.shards) > 3
    assert len(dataset) == dataset.manifest.num_sequences * 64 // tokens
    sample = dataset[len(dataset) - 1]
    assert sample.shape == (tokens,)
    assert not sample.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        sample[0] = 0
    order = dataset.order(3)(np.arange(len(dataset)))
    gathered = dataset.gather(order)
    np.testing.assert_array_equal(gathered, np.stack([dataset[int(i)] for i in order]))
    assert dataset.gather(order[:2], np.int64).dtype == np.int64
    for index in (-1, len(dataset)):
        with pytest.raises(IndexError):
            dataset[index]
        with pytest.raises(IndexError):
            dataset.gather(np.array([index]))
    again = pickle.loads(pickle.dumps(dataset))
    np.testing.assert_array_equal(again[1], dataset[1])


@pytest.mark.parametrize("compressed", [False, True])
def test_gathering_nothing_gives_nothing(prepared: RunConfig, compressed: bool) -> None:
    split = prepared.data_dir / "train"
    if compressed:
        compress_split(split)
    dataset = ShardDataset(split, 32)
    nothing = dataset.gather(np.array([], np.int64))
    assert (nothing.shape, nothing.dtype) == ((0, 32), np.uint16)
    assert dataset.gather(np.array([]), np.int64).dtype == np.int64


def test_gathering_from_a_split_shorter_than_a_sample_says_so(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace
) -> None:
    path = kit.write_lines(tmp_path / "in.jsonl", ["the patch"])
    config = make_config(path, splits={"heldout": 1.0})
    prepare(config)
    dataset = ShardDataset(config.data_dir / "heldout", 64)
    assert dataset.gather(np.arange(0)).shape == (0, 64)
    with pytest.raises(
        ShardError,
        match="heldout has no sample of 64 tokens: it holds ",
        check=lambda error: error.exit_code == 2,
    ):
        dataset.gather(np.array([0]))


def test_a_sample_size_that_does_not_divide_is_refused(prepared: RunConfig) -> None:
    with pytest.raises(ShardError, match="sequences of 64 tokens; samples of 48"):
        ShardDataset(prepared.data_dir / "train", 48)


def test_missing_changed_and_foreign_shards_are_clear_errors(prepared: RunConfig) -> None:
    split = prepared.data_dir / "train"
    names = [s.name for s in Manifest.read(split).shards]
    shard = split / names[1]
    whole = shard.read_bytes()
    shard.unlink()
    with pytest.raises(ShardError, match=rf"{names[1]} is missing"):
        ShardDataset(split, 64)
    shard.write_bytes(whole[:-4])
    with pytest.raises(ShardError, match="cut or changed"):
        ShardDataset(split, 64)
    shutil.copyfile(split / names[0], shard)
    with pytest.raises(ShardError, match="does not belong to its manifest"):
        ShardDataset(split, 64)


def test_an_id_that_was_never_written_is_refused_when_read(prepared: RunConfig) -> None:
    split = prepared.data_dir / "train"
    shard = split / Manifest.read(split).shards[0].name
    with shard.open("r+b") as file:
        file.seek(HEADER_BYTES + 2 * 64)
        file.write(b"\xff\xff")
    dataset = ShardDataset(split, 64)
    assert dataset[0].shape == (64,)
    with pytest.raises(ShardError, match=rf"{shard.name} is damaged: its sample 1 holds id 65535"):
        dataset[1]
    with pytest.raises(ShardError, match=rf"{shard.name} is damaged: its sample 1 holds id 65535"):
        dataset.gather(np.array([3, 1]))


def test_gathering_checks_a_shard_that_another_process_saw_when_it_is_first_read(prepared: RunConfig) -> None:
    split = prepared.data_dir / "train"
    first = ShardDataset(split, 64)
    dataset = ShardDataset(split, 64, seen=(first.manifest, first.num_bytes))
    shard = split / first.manifest.shards[-1].name
    shard.write_bytes(shard.read_bytes()[:-4])
    np.testing.assert_array_equal(dataset.gather(np.array([1, 0])), np.stack([first[1], first[0]]))
    with pytest.raises(ShardError, match="cut or changed"):
        dataset.gather(np.array([0, len(dataset) - 1]))


def test_a_manifest_changed_by_hand_is_refused(prepared: RunConfig) -> None:
    path = prepared.data_dir / "train/manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"kept": ', '"kept": 1'))
    with pytest.raises(ShardError, match="counts do not add up"):
        ShardDataset(path.parent, 64)
    path.write_text(text.replace('"bos_id": 0', '"bos_id": 7'))
    with pytest.raises(ShardError, match="changed after it was written"):
        ShardDataset(path.parent, 64)
    path.unlink()
    with pytest.raises(ShardError, match="has not finished"):
        ShardDataset(path.parent, 64)


def test_the_fingerprint_is_of_the_contents(
    tmp_path: Path, prepared: RunConfig, make_config: MakeConfig, kit: SimpleNamespace
) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(prepared.data_dir / "train", moved)
    assert ShardDataset(moved, 64).fingerprint == ShardDataset(prepared.data_dir / "train", 64).fingerprint
    other = make_config(kit.write_lines(tmp_path / "o.jsonl", kit.make_texts(200, seed=1)), workdir="o")
    prepare(other)
    assert ShardDataset(other.data_dir / "train", 64).fingerprint != ShardDataset(moved, 64).fingerprint


def test_verify_finds_a_flipped_bit_and_nothing_else(prepared: RunConfig) -> None:
    assert [v.problems for v in verify_tree(prepared.data_dir)] == [[], []]
    assert [v.directory.name for v in verify_tree(prepared.data_dir)] == ["heldout", "train"]
    split = prepared.data_dir / "train"
    shard = split / Manifest.read(split).shards[2].name
    data = bytearray(shard.read_bytes())
    data[HEADER_BYTES + 11] ^= 1
    shard.write_bytes(data)
    ShardDataset(split, 64)  # opening does not read the tokens
    problems = verify_split(split).problems
    assert len(problems) >= 1
    assert "do not fit their checksum" in problems[0]
    assert shard.name in problems[0]
    with pytest.raises(ShardError, match="no prepared split"):
        verify_tree(split.parent.parent.parent)
    assert verify_shards(prepared.workdir) == 1


def test_the_cold_form_trains_directly_and_expands_to_the_same_bytes(prepared: RunConfig) -> None:
    split = prepared.data_dir / "train"
    before = {p.name: p.read_bytes() for p in split.iterdir()}
    samples = everything(split, 16)
    fingerprint = Manifest.read(split).fingerprint
    compress_split(split)
    assert not list(split.glob("*.shard"))
    np.testing.assert_array_equal(everything(split, 16), samples)
    cold_set = ShardDataset(split, 16)
    np.testing.assert_array_equal(cold_set.gather(np.arange(len(cold_set))[::-3]), samples[::-3])
    assert Manifest.read(split).fingerprint == fingerprint
    assert verify_split(split).ok
    assert prepare(prepared).already_done
    cold = next(iter(split.glob("*.shard.zst")))
    whole = cold.read_bytes()
    damaged = bytearray(whole)
    damaged[HEADER_BYTES + 60] ^= 0xFF
    cold.write_bytes(damaged)
    assert not verify_split(split).ok
    cold.write_bytes(whole)
    expand_split(split)
    assert {p.name: p.read_bytes() for p in split.iterdir()} == before


def test_staging_copies_once_and_checks(tmp_path: Path, prepared: RunConfig) -> None:
    split, local = prepared.data_dir / "train", tmp_path / "local"
    fetched = []

    def fetch(name: str, target: Path) -> None:
        fetched.append(Path(name).name)
        shutil.copyfile(name, target)

    stage_split(split, local, fetch)
    np.testing.assert_array_equal(everything(local), everything(split))
    count = len(fetched)
    again = stage_split(split, local, fetch)
    assert fetched[count:] == ["manifest.json"]
    assert (again.num_bytes, again.num_kept) == (0, count - 1)
    spoilt = next(local.glob("0*.shard"))
    spoilt.write_bytes(spoilt.read_bytes()[:-1] + b"\xff")
    stage_split(split, local, fetch)  # what is there is checked, not believed
    assert fetched[count + 1 :] == ["manifest.json", spoilt.name]
    np.testing.assert_array_equal(everything(local), everything(split))

    def damage(name: str, target: Path) -> None:
        data = bytearray(Path(name).read_bytes())
        data[-1] ^= 1
        target.write_bytes(data if name.endswith(".shard") else Path(name).read_bytes())

    with pytest.raises(ShardError, match="arrived damaged"):
        stage_split(split, tmp_path / "bad", damage)
    assert not (tmp_path / "bad/manifest.json").exists()


def test_inspection_shows_text_source_and_lengths(
    tmp_path: Path, prepared: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    split = prepared.data_dir / "train"
    tokenizer = load_tokenizer(prepared.tokenizer, prepared.tokenizer_path)
    first = read_sequence(split, 0, tokenizer)
    assert first.text is not None
    assert first.text.startswith("<|begin_of_text|>")
    assert "in.jsonl.zst" in first.source
    again = read_sequence(split, 0, load_split_tokenizer(split))
    assert again.text == first.text
    with pytest.raises(ShardError, match="holds sequences 0 to"):
        read_sequence(split, 10**6)
    other = load_tokenizer(prepared.tokenizer.model_copy(update={"add_eos": True}), prepared.tokenizer_path)
    with pytest.raises(ShardError, match="another tokenizer"):
        read_sequence(split, 0, other)
    show_split(split, Manifest.read(split), Console(width=80))
    shown = capsys.readouterr().out
    assert "fingerprint" in shown and "█" in shown
    assert not [line for line in shown.splitlines() if line and not line.strip("█")], "a bar was broken"
    draw_lengths(Manifest.read(split), tmp_path / "lengths.png")
    assert (tmp_path / "lengths.png").stat().st_size > 5000


def test_megatron_pairs_round_trip_and_match_megatron_itself(tmp_path: Path, prepared: RunConfig) -> None:
    split = prepared.data_dir / "train"
    export_megatron(split, tmp_path / "m/train")
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    theirs = IndexedDataset(str(tmp_path / "m/train"))
    samples = everything(split)
    assert len(theirs) == len(samples)
    np.testing.assert_array_equal(np.stack([theirs[i] for i in range(len(theirs))]), samples)
    tokenizer = load_tokenizer(prepared.tokenizer, prepared.tokenizer_path)
    assert prepared.prep is not None
    back = import_megatron(tmp_path / "m/train", tmp_path / "back", tokenizer, prepared.prep, vocab_size=400)
    np.testing.assert_array_equal(everything(tmp_path / "back/train"), samples)
    assert back.tokens.closes()
    assert verify_split(tmp_path / "back/train").ok
    with pytest.raises(ShardError, match="ids outside"):
        import_megatron(tmp_path / "m/train", tmp_path / "x", tokenizer, prepared.prep, vocab_size=100)
    data = tmp_path / "m/train.bin"
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    with pytest.raises(ShardError, match="truncated or foreign"):
        open_megatron(tmp_path / "m/train")


def test_reading_ahead_keeps_order_hands_over_errors_and_stops() -> None:
    with closing(read_ahead(iter(range(50)), 3)) as items:
        assert list(items) == list(range(50))

    def failing():
        yield 1
        raise KeyError("x")

    with closing(read_ahead(failing())) as items:
        assert next(items) == 1
        with pytest.raises(KeyError):
            next(items)
    with closing(read_ahead(iter(range(10**9)))) as items:
        assert next(items) == 0
