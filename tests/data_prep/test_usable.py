"""A source or a file that gives no document is named with the fields found in it, and refused unless allowed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from calm_scale.config import RunConfig
from calm_scale.stages.prep_display import show_report
from data_prep.errors import PrepError
from data_prep.prep import prepare
from data_prep.prep.prep_report import PrepReport
from data_prep.shards.manifest import Manifest

MakeConfig = Callable[..., RunConfig]


def write_records(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def good(tmp_path: Path, kit: SimpleNamespace) -> Path:
    return kit.write_lines(tmp_path / "good.jsonl", kit.make_texts(2000, words=10))


@pytest.fixture
def renamed(tmp_path: Path) -> Path:
    """One record, far below the limit on bad records."""
    return write_records(tmp_path / "renamed.jsonl", [{"content": "a text", "id": 1}])


def test_a_source_with_another_text_field_is_refused_with_the_fields_found(
    make_config: MakeConfig, good: Path, renamed: Path
) -> None:
    sources = [{"paths": [str(good)]}, {"paths": [str(renamed)]}]
    config = make_config([], sources=sources)
    with pytest.raises(
        PrepError,
        match=r"(?s)prep\.sources\[1\]: .*renamed\.jsonl.*missing_text 1.*No record has the field `text`; fields "
        r"found: `content`, `id`.*prep\.sources\[1\]\.text_field.*on_unusable_input",
        check=lambda error: error.exit_code == 2,
    ):
        prepare(config)
    assert not (config.data_dir / "manifest.json").exists()
    sources[1]["text_field"] = "content"
    prepare(make_config([], "named", sources=sources))


def test_a_file_among_good_ones_is_refused_or_reported_as_the_setting_says(
    make_config: MakeConfig, good: Path, renamed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config([good, renamed])
    with pytest.raises(
        PrepError,
        match=r"renamed\.jsonl: 1 records, none usable \(missing_text 1\)",
        check=lambda error: error.exit_code == 2,
    ):
        prepare(config)
    shard = config.data_dir / "train/000000-000000.shard"
    written = shard.stat().st_mtime_ns
    allowed = make_config([good, renamed], on_unusable_input="report")
    report = prepare(allowed)
    assert shard.stat().st_mtime_ns == written, "finished work is kept"
    assert list(report.unusable_inputs) == [str(renamed)]
    show_report(report)
    assert "no usable record · " in capsys.readouterr().out
    stored = PrepReport.read(config.data_dir)
    assert stored is not None
    assert stored.unusable_inputs == report.unusable_inputs
    (source,) = stored.sources
    assert (source.inputs, source.unusable, source.read, source.kept) == (2, 1, 2001, 2000)
    assert source.quarantined == {"missing_text": 1}
    provenance = Manifest.read(config.data_dir / "train").provenance
    assert provenance["unusable_inputs"] == report.unusable_inputs


def test_a_source_whose_filter_keeps_nothing_is_refused_with_the_sets_found(
    make_config: MakeConfig, good: Path, tmp_path: Path, kit: SimpleNamespace
) -> None:
    other = kit.write_lines(tmp_path / "other.jsonl", ["one text"])
    sources = [{"paths": [str(good)]}, {"paths": [str(other)], "include_sets": ["Wikipedia"]}]
    with pytest.raises(
        PrepError,
        match=r"(?s)prep\.sources\[1\].*of other sets 1.*Sets found: `T`",
        check=lambda error: error.exit_code == 2,
    ):
        prepare(make_config([], sources=sources))


def test_a_file_without_records_is_counted_and_not_refused(
    make_config: MakeConfig, good: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text("\n\n")
    report = prepare(
        make_config([good, tmp_path / "empty.jsonl", tmp_path / "blank.jsonl"]),
    )
    assert report.unusable_inputs == {}
    assert report.sources[0].unusable == 2


def test_a_corpus_that_is_hopeless_from_the_start_names_the_fields_found(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    path = write_records(tmp_path / "a.jsonl", [{"body": "x", "id": i} for i in range(1500)])
    with pytest.raises(PrepError, match=r"1500 bad records.*fields found: `body`, `id`.*text_field"):
        prepare(make_config(path))
