"""prepare: arithmetic that closes, text that comes back, bad input handled."""

from __future__ import annotations

import gzip
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zstandard

from calm_scale.config import RunConfig
from calm_scale.config.errors import ConfigError
from data_prep.errors import PrepError, ShardError, SourceError
from data_prep.prep import prepare
from data_prep.prep.prep_report import PrepReport
from data_prep.shards.manifest import Manifest
from data_prep.shards.reading import ShardDataset
from data_prep.tokenizer import load_tokenizer

MakeConfig = Callable[..., RunConfig]


def run(config: RunConfig) -> PrepReport:
    return prepare(config)


def texts_of(config: RunConfig, kit: SimpleNamespace, split: str = "train") -> list[str]:
    tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_path)
    return [tokenizer.decode(ids) for ids in kit.stored_documents(config.data_dir / split)]


def check_closed(config: RunConfig, report: PrepReport) -> None:
    """Documents and tokens add up, in every split and over all of them."""
    manifests = [Manifest.read(config.data_dir / s.name) for s in report.splits]
    for manifest in manifests:
        assert manifest.documents.closes()
        assert manifest.tokens.closes()
        assert manifest.tokens.stored == manifest.num_sequences * manifest.sequence_length
    raw = json.loads((config.data_dir / "manifest.json").read_text())
    assert raw["documents"]["kept"] == sum(m.documents.kept for m in manifests)
    assert raw["tokens"]["stored"] == sum(m.tokens.stored for m in manifests)
    assert raw["documents"]["read"] == raw["documents"]["kept"] + raw["documents"]["filtered"] + raw[
        "documents"
    ]["duplicates"] + sum(raw["documents"]["quarantined"].values())


@pytest.mark.parametrize("packing", ["concat", "aligned", "best-fit"])
@pytest.mark.parametrize("eos", [False, True])
def test_text_round_trips_and_counts_close(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace, packing: str, eos: bool
) -> None:
    texts = kit.make_texts(120)
    kit.write_lines(tmp_path / "in/a.jsonl.zst", texts[:50])
    kit.write_lines(tmp_path / "in/b.JSONL", texts[50:])
    config = make_config(
        tmp_path / "in",
        packing=packing,
        tokenizer={"add_eos": eos},
        segment_megabytes=0.005,
        sequence_length=128,
    )
    report = run(config)
    check_closed(config, report)
    manifest = Manifest.read(config.data_dir / "train")
    assert manifest.documents.kept == 120
    assert manifest.tokens.bos == 120
    assert manifest.tokens.eos == 120 * eos
    stored = texts_of(config, kit)
    if packing == "best-fit":
        assert manifest.tokens.tail == 0
        tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_path)
        short = [t for t in texts if len(tokenizer.encode(t)) + 2 <= 128]
        assert len(short) > 50
        assert set(short) <= set(stored)
    elif packing == "aligned":
        assert manifest.tokens.padding > 0
        starts = [
            i
            for row in range(manifest.num_sequences)
            for i in np.flatnonzero(ShardDataset(config.data_dir / "train", 128)[row] == manifest.bos_id)
        ]
        assert not np.any(np.array(starts) % 8)
    else:
        assert manifest.tokens.padding == 0


def test_concat_stores_the_exact_stream_in_order(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace
) -> None:
    """One file, one segment: the stored ids are BOS + text, text after text; only the last cut is missing."""
    texts = kit.make_texts(60)
    config = make_config(kit.write_lines(tmp_path / "a.jsonl.gz.jsonl", texts), sequence_length=32)
    run(config)
    tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_path)
    expected = [i for t in texts for i in (tokenizer.bos_id, *tokenizer.encode(t))]
    dataset = ShardDataset(config.data_dir / "train", 8)
    stored = np.concatenate([dataset[i] for i in range(len(dataset))])
    np.testing.assert_array_equal(stored, expected[: len(expected) // 32 * 32])
    manifest = dataset.manifest
    assert manifest.tokens.tail == len(expected) % 32
    assert manifest.dtype == "uint16"
    assert manifest.max_id == max(stored)


def test_splits_are_disjoint_by_content(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace
) -> None:
    texts = kit.make_texts(600, words=20)
    config = make_config(
        kit.write_lines(tmp_path / "a.jsonl.zst", [*texts, *texts]),
        splits={"heldout": 0.2, "autoencoder": 0.3},
        sequence_length=16,
        segment_megabytes=0.02,
    )
    check_closed(config, run(config))
    counts = {
        s: Manifest.read(config.data_dir / s).documents.kept for s in ("heldout", "autoencoder", "train")
    }
    assert sum(counts.values()) == 1200
    assert abs(counts["heldout"] - 240) < 80
    assert abs(counts["autoencoder"] - 360) < 90
    kept = {s: set(texts_of(config, kit, s)) & set(texts) for s in counts}
    assert not kept["heldout"] & kept["train"]
    assert not kept["heldout"] & kept["autoencoder"]
    assert not kept["autoencoder"] & kept["train"]


def test_exact_duplicates_are_dropped_and_the_first_stays(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace
) -> None:
    texts = kit.make_texts(100)
    doubled = texts + random.Random(0).sample(texts, 60)
    paths = [kit.write_lines(tmp_path / f"{i}.jsonl", doubled[i::3]) for i in range(3)]
    config = make_config(paths, deduplicate=True, sequence_length=8, segment_megabytes=0.003)
    report = run(config)
    check_closed(config, report)
    assert report.documents["duplicates"] == 60
    assert report.documents["kept"] == 100
    assert not (config.data_dir / ".prep").exists()


def test_a_document_repeats_only_what_is_kept(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace
) -> None:
    """The first of two equal files is cut and left out as a whole: the second is no duplicate of it."""
    texts = kit.make_texts(300)
    whole = kit.write_lines(tmp_path / "b.jsonl.zst", texts)
    (tmp_path / "a.jsonl.zst").write_bytes(whole.read_bytes()[:-9])
    for workers in (1, 2):
        config = make_config(
            [tmp_path / "a.jsonl.zst", whole],
            f"run{workers}",
            workers=workers,
            deduplicate=True,
            on_corrupt_file="quarantine",
            segment_megabytes=0.01,
            sequence_length=8,
        )
        report = run(config)
        check_closed(config, report)
        assert (report.documents["kept"], report.documents["duplicates"]) == (300, 0)
        assert list(report.corrupt_inputs) == [str(tmp_path / "a.jsonl.zst")]


def test_bad_records_are_counted_with_file_and_line(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace
) -> None:
    good = [json.dumps({"text": t}).encode() for t in kit.make_texts(400)]
    lines = [
        *good[:100],
        b"",
        b"not json",
        *good[100:300],
        b'{"text": null}',
        b'{"text": "\xff"}',
        *good[300:],
    ]
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(lines))
    config = make_config(path, segment_megabytes=0.004, max_bad_fraction=0.01)
    report = run(config)
    check_closed(config, report)
    assert report.documents["quarantined"] == {
        "blank": 1,
        "broken_json": 1,
        "invalid_utf8": 1,
        "null_text": 1,
    }
    rejected = [json.loads(line) for line in (config.data_dir / "quarantine.jsonl").read_text().splitlines()]
    assert [(r["file"], r["line"], r["kind"]) for r in rejected] == [
        (str(path), 101, "blank"),
        (str(path), 102, "broken_json"),
        (str(path), 303, "null_text"),
        (str(path), 304, "invalid_utf8"),
    ]
    assert rejected[3]["raw"].encode("utf-8", "surrogateescape") == b'{"text": "\xff"}'


def test_the_limit_on_bad_records_ends_the_run_and_may_be_raised(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace
) -> None:
    path = kit.write_lines(tmp_path / "a.jsonl", kit.make_texts(200))
    path.write_bytes(path.read_bytes() + b"broken\n" * 3)
    with pytest.raises(
        PrepError, match=r"3 of 203 records are bad \(1\.478%.*broken_json 3.*quarantine\.jsonl"
    ):
        run(make_config(path))
    config = make_config(path, max_bad_fraction=0.02)
    assert not (config.data_dir / "train/manifest.json").exists()
    assert run(config).documents["quarantined"] == {"broken_json": 3}


@pytest.mark.parametrize("kind", ["zst", "gz"])
def test_a_truncated_file_stops_the_run_or_is_left_out(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace, kind: str
) -> None:
    texts = kit.make_texts(300)
    for i in range(2):
        kit.write_lines(tmp_path / f"in/{i}.jsonl.zst", texts[i::3])
    data = b"".join(json.dumps({"text": t}).encode() + b"\n" for t in texts[2::3])
    packed = zstandard.compress(data) if kind == "zst" else gzip.compress(data)
    (tmp_path / f"in/cut.jsonl.{kind}").write_bytes(packed[: int(len(packed) * 0.6)])
    with pytest.raises(SourceError, match=rf"cut\.jsonl\.{kind} is truncated.*after \d+ bytes"):
        run(make_config(tmp_path / "in"))
    with pytest.raises(ShardError, match="has not finished"):
        ShardDataset(tmp_path / "run/data/train", 64)
    config = make_config(tmp_path / "in", workdir="other", on_corrupt_file="quarantine")
    report = run(config)
    check_closed(config, report)
    assert list(report.corrupt_inputs) == [str(tmp_path / f"in/cut.jsonl.{kind}")]
    assert report.documents["kept"] == 200
    raw = json.loads((config.data_dir / "manifest.json").read_text())
    assert "truncated" in str(raw["corrupt_inputs"])


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.zst"])
@pytest.mark.parametrize("deduplicate", [False, True])
def test_a_document_longer_than_several_segments_hides_nothing_behind_it(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace, suffix: str, deduplicate: bool
) -> None:
    texts = [*kit.make_texts(20), "long " * 6000, *kit.make_texts(20, seed=1), "last " * 6000]
    path = kit.write_lines(tmp_path / f"a.{suffix}", texts)
    config = make_config(path, segment_megabytes=0.005, sequence_length=8, deduplicate=deduplicate)
    report = run(config)
    assert (report.documents["kept"], report.tokens["bos"]) == (42, 42)
    assert texts[20].startswith(texts_of(config, kit)[20][:29000])


def test_empty_documents_leave_no_trace(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace
) -> None:
    path = kit.write_lines(tmp_path / "a.jsonl", ["", "   ", "a" * 50])
    config = make_config(path, sequence_length=8)
    report = run(config)
    assert report.documents["quarantined"] == {"empty": 2}
    assert report.tokens["bos"] == 1


def test_a_starved_split_is_refused_with_the_share_that_works(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace
) -> None:
    path = kit.write_lines(tmp_path / "a.jsonl", kit.make_texts(20))
    begin = time.perf_counter()
    with pytest.raises(PrepError, match=r"splits\.heldout = 0\.0001.*smallest share.*about 0\.\d+"):
        run(make_config(path, splits={"heldout": 0.0001}, sequence_length=32))
    with pytest.raises(PrepError, match="less than one sequence of 65536"):
        run(make_config(path, sequence_length=65536))
    assert time.perf_counter() - begin < 20
    run(make_config(path, sequence_length=32))  # the refused runs left nothing in the way


def test_nothing_readable_is_an_error(tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="no file to read"):
        run(make_config(tmp_path / "empty"))
    with pytest.raises(SourceError, match="nothing readable matches"):
        run(make_config(tmp_path / "none/*.jsonl"))
    (tmp_path / "blank.jsonl").write_bytes(b"\n\n\n")
    with pytest.raises(PrepError, match="no document is left"):
        run(make_config(tmp_path / "blank.jsonl"))
    (tmp_path / "zero.jsonl").write_bytes(b"")
    with pytest.raises(PrepError, match="no document is left of 0 records"):
        run(make_config(tmp_path / "zero.jsonl", workdir="other"))
    (tmp_path / "named.jsonl").write_bytes(b'{"content": "a text"}\n')
    with pytest.raises(
        PrepError, match=r"has the field `text`; fields found: `content`\. Set prep\.sources\[0\]\.text_field"
    ):
        run(make_config(tmp_path / "named.jsonl", workdir="third"))


def test_long_documents_take_linear_time_and_come_back(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace
) -> None:
    """A document with spaces, one without, one of newlines, 1 MB each (5 MB each in the benchmark)."""
    draw = random.Random(1)
    spaced = " ".join(draw.choices(["alpha", "beta", "gamma", "x1"], k=200_000))
    texts = [spaced, "q" * 1_000_000, "line\n" * 60_000 + "\n" * 200_000]
    config = make_config(kit.write_lines(tmp_path / "a.jsonl.zst", texts), sequence_length=8)
    begin = time.perf_counter()
    report = run(config)
    assert time.perf_counter() - begin < 60
    assert report.documents["kept"] == 3
    assert report.tokens["bos"] == 3
    stored = texts_of(config, kit)
    assert stored[:2] == texts[:2]
    assert texts[2].startswith(stored[2])


def test_mixture_weights_and_filters_reach_the_reader(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace
) -> None:
    a = kit.write_lines(tmp_path / "a.jsonl", kit.make_texts(200, seed=1))
    b = kit.write_lines(tmp_path / "b.jsonl", kit.make_texts(100, seed=2))
    sources = [{"paths": [str(b)], "weight": 3.0}, {"paths": [str(a)]}]
    config = make_config([], sources=sources, sequence_length=16, segment_megabytes=0.002)
    run(config)
    dataset = ShardDataset(config.data_dir / "train", 16)
    first = dataset.manifest.sources[0].num_sequences
    n = len(dataset)
    stream = dataset.order(0)(np.arange(n))
    share = 3 * first / (3 * first + (n - first))
    assert abs((stream < first).sum() - share * n) <= 1
    before = {p: p.stat().st_mtime_ns for p in config.data_dir.glob("*/*.shard")}
    sources[0]["weight"] = 0.5
    again = run(make_config([], sources=sources, sequence_length=16, segment_megabytes=0.002))
    assert again.already_done  # a weight is the order's business: no text is tokenized again
    assert {p: p.stat().st_mtime_ns for p in config.data_dir.glob("*/*.shard")} == before
    lighter = ShardDataset(config.data_dir / "train", 16)
    assert (lighter.order(0)(np.arange(n)) < first).sum() < (stream < first).sum()
    assert lighter.fingerprint != dataset.fingerprint  # a resume notices it
    assert again.splits[0].fingerprint == lighter.fingerprint
    filtered = make_config(a, workdir="f", sources=[{"paths": [str(a)], "exclude_sets": ["T"]}])
    with pytest.raises(PrepError, match="no document is left of 200"):
        run(filtered)


def test_the_vocabulary_must_hold_every_id(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace
) -> None:
    path = kit.write_lines(tmp_path / "a.jsonl", kit.make_texts(20))
    with pytest.raises(ConfigError, match=r"vocab_size is 399.*at least 400"):
        run(make_config(path, vocab_size=399))
    with pytest.raises(ConfigError, match=r"vocab_size is 400.*at least 401"):
        run(make_config(path, tokenizer={"pad_token": "<|extra|>"}))


def test_parquet_and_saved_datasets(tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace) -> None:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = kit.make_texts(80)
    pq.write_table(pa.table({"text": [*texts, None, ""]}), tmp_path / "a.parquet", row_group_size=7)
    config = make_config(
        tmp_path / "a.parquet", segment_megabytes=0.001, max_bad_fraction=0.1, sequence_length=8
    )
    report = run(config)
    assert report.documents["quarantined"] == {"empty": 1, "null_text": 1}
    rejected = (config.data_dir / "quarantine.jsonl").read_text()
    assert '"line": 81' in rejected
    assert '"line": 82' in rejected
    raw = [*(t.encode() for t in texts), b"\xff"]
    pq.write_table(pa.table({"text": pa.array(raw, pa.binary())}), tmp_path / "raw.parquet")
    report = run(make_config(tmp_path / "raw.parquet", "raw", max_bad_fraction=0.1, sequence_length=8))
    assert report.documents["quarantined"] == {"invalid_utf8": 1}
    assert report.documents["kept"] == 80
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(tmp_path / "saved"))
    other = make_config(
        [],
        workdir="d",
        sources=[{"dataset": str(tmp_path / "saved")}],
        segment_megabytes=0.1,
        sequence_length=8,
    )
    run(other)
    plain = make_config(kit.write_lines(tmp_path / "a.jsonl", texts), workdir="p", sequence_length=8)
    run(plain)
    for split in (config, other, plain):
        assert ShardDataset(split.data_dir / "train", 8).manifest.documents.kept == 80
    assert kit.count_text(other.data_dir / "train") == kit.count_text(plain.data_dir / "train")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(SourceError, match=r"cut\.parquet is truncated"):
        run(make_config(tmp_path / "cut.parquet", workdir="c"))
