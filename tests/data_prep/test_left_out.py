"""`on_corrupt_file: quarantine` leaves out what is damaged, and nothing else: no mistake, no file that moves."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from calm_scale.config import RunConfig
from data_prep.errors import SourceError
from data_prep.inputs.records import RecordParser
from data_prep.prep import prepare

MakeConfig = Callable[..., RunConfig]


@pytest.fixture(params=[False, True], ids=["encode", "hash first"])
def lenient(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"on_corrupt_file": "quarantine", "sequence_length": 32, "deduplicate": request.param}


def test_a_truncated_parquet_file_is_left_out(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace, lenient: dict[str, Any]
) -> None:
    for i, name in enumerate(("good", "trunc")):
        path = tmp_path / f"in/{name}.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"text": kit.make_texts(40, seed=i)}), path)
    path.write_bytes(path.read_bytes()[:-20])
    report = prepare(make_config(tmp_path / "in", **lenient))
    assert report.documents["kept"] == 40
    assert list(report.corrupt_inputs) == [str(path)]
    assert "truncated" in report.corrupt_inputs[str(path)]


@pytest.mark.parametrize("mistake", [{"text_field": "body"}, {"split": "validation"}])
def test_a_mistake_is_not_damage(
    tmp_path: Path,
    make_config: MakeConfig,
    kit: SimpleNamespace,
    lenient: dict[str, Any],
    mistake: dict[str, str],
) -> None:
    kit.write_lines(tmp_path / "a.jsonl", kit.make_texts(40))
    saved = datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": kit.make_texts(40, seed=1)}))
    saved.save_to_disk(str(tmp_path / "saved"))
    sources = [{"paths": [str(tmp_path / "a.jsonl")]}, {"dataset": str(tmp_path / "saved"), **mistake}]
    with pytest.raises(
        SourceError, match=next(iter(mistake.values())), check=lambda error: error.exit_code == 2
    ):
        prepare(make_config([], sources=sources, **lenient))


def test_a_file_that_changes_is_not_damage(
    tmp_path: Path,
    make_config: MakeConfig,
    kit: SimpleNamespace,
    lenient: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = kit.write_lines(tmp_path / "a.jsonl", kit.make_texts(40))
    parse = RecordParser.parse

    def touched(parser: RecordParser, *arguments: Any) -> Any:
        os.utime(path, (1, 1))
        return parse(parser, *arguments)

    monkeypatch.setattr(RecordParser, "parse", touched)
    with pytest.raises(SourceError, match="changed while it was being read"):
        prepare(make_config(path, **lenient))


def test_the_number_of_workers_is_the_documents(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace, capfd: pytest.CaptureFixture[str]
) -> None:
    from calm_scale.cli.app import main
    from calm_scale.config import to_yaml

    kit.write_lines(tmp_path / "a.jsonl", kit.make_texts(40))
    document = tmp_path / "run.yaml"
    document.write_text(to_yaml(make_config(tmp_path / "a.jsonl", sequence_length=32, workers=2)))
    for options, workers in (([], 2), (["--workers", "1"], 1)):
        with pytest.MonkeyPatch.context() as patched, pytest.raises(SystemExit) as stopped:
            patched.setattr("sys.argv", ["calm-scale", "prep", str(document), "--restart", *options])
            main()
        assert not stopped.value.code
        assert f"workers: {workers}" in " ".join(capfd.readouterr().out.split())
