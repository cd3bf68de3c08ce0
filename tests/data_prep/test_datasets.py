"""Hugging Face datasets by a name that ``load_dataset`` takes: streamed, and bounded when it cannot be found."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from calm_scale.config import RunConfig
from data_prep.errors import PrepError, SourceError
from data_prep.inputs import tables as hub
from data_prep.prep import prepare

MakeConfig = Callable[..., RunConfig]


@pytest.fixture
def folder(tmp_path: Path, kit: SimpleNamespace) -> Path:
    """Two Parquet files that ``load_dataset(folder, streaming=True)`` reads."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = kit.make_texts(60)
    (tmp_path / "hub").mkdir()
    for i in range(2):
        pq.write_table(
            pa.table({"text": texts[i * 30 : i * 30 + 30]}), tmp_path / f"hub/train-{i:05d}.parquet"
        )
    return tmp_path / "hub"


def config_of(make_config: MakeConfig, dataset: object, workdir: str = "run", **source: object) -> RunConfig:
    sources = [{"dataset": str(dataset), **source}]
    return make_config([], workdir, sources=sources, segment_megabytes=0.1, sequence_length=8)


def test_a_streamed_dataset_is_its_files(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace, folder: Path
) -> None:
    config = config_of(make_config, folder)
    prepare(config)
    plain = make_config(kit.write_lines(tmp_path / "a.jsonl", kit.make_texts(60)), "plain", sequence_length=8)
    prepare(plain)
    assert kit.count_text(config.data_dir / "train") == kit.count_text(plain.data_dir / "train")
    (folder / "train-00001.parquet").unlink()
    with pytest.raises(PrepError, match="other settings or inputs", check=lambda error: error.exit_code == 2):
        prepare(config)


def test_a_split_or_folder_that_is_not_there_is_a_mistake(make_config: MakeConfig, folder: Path) -> None:
    with pytest.raises(
        SourceError,
        match=r"split 'test'.*Available splits: \['train'\]",
        check=lambda error: error.exit_code == 2,
    ) as told:
        prepare(config_of(make_config, folder, split="test"))
    assert told.value.exit_code == 2
    with pytest.raises(
        SourceError, match="there is no dataset folder", check=lambda error: error.exit_code == 2
    ):
        prepare(config_of(make_config, folder / "none", "other"))
    with pytest.raises(SourceError, match="has no field 'body'", check=lambda error: error.exit_code == 2):
        prepare(config_of(make_config, folder, "third", text_field="body"))


def test_a_hub_that_does_not_answer_is_given_up(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    monkeypatch.setattr(hub, "OPEN_SECONDS", 0.2)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: time.sleep(120))
    began = time.monotonic()
    with pytest.raises(SourceError, match=r"'org/none'.*did not answer within 0 s.*network"):
        prepare(config_of(make_config, "org/none"))
    assert time.monotonic() - began < 60

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'org/none' on the Hub")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    with pytest.raises(SourceError, match=r"Couldn't reach 'org/none'.*is the name right"):
        prepare(config_of(make_config, "org/none", "other"))


def saved(folder: Path, **splits: list[str]) -> Path:
    """What ``save_to_disk`` writes of a dataset with these splits; of one alone that is named ``alone``."""
    import datasets

    tables = {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in splits.items()}
    tables.get("alone", datasets.DatasetDict(tables)).save_to_disk(str(folder))
    return folder


@pytest.mark.parametrize("splits", [{"alone": []}, {"train": [], "test": ["a"]}], ids=str)
def test_a_saved_dataset_without_rows_is_a_mistake(
    tmp_path: Path, make_config: MakeConfig, splits: dict[str, list[str]]
) -> None:
    folder = saved(tmp_path / "saved", **splits)
    with pytest.raises(
        SourceError, match=r"saved' \(split 'train'\) holds no rows", check=lambda error: error.exit_code == 2
    ) as told:
        prepare(config_of(make_config, folder))
    assert "network" not in str(told.value)


def test_a_saved_dataset_says_which_splits_it_has(tmp_path: Path, make_config: MakeConfig) -> None:
    folder = saved(tmp_path / "saved", one=["a"], two=["b"])
    with pytest.raises(
        SourceError,
        match=r"'train'\) has no such split; it has: one, two",
        check=lambda error: error.exit_code == 2,
    ):
        prepare(config_of(make_config, folder))


@pytest.mark.parametrize("share", [0.0, 0.002, 0.5, 0.99])
def test_a_saved_dataset_that_was_cut_is_a_failure_of_its_file(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace, share: float
) -> None:
    folder = saved(tmp_path / "saved", alone=kit.make_texts(300))
    [file] = folder.glob("*.arrow")
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    with pytest.raises(SourceError, match=r"saved'.* cannot be read: .*is it whole") as told:
        prepare(config_of(make_config, folder))
    assert told.value.exit_code == 1
    assert "network" not in str(told.value)
