"""A prep on a file system that shows what its workers wrote late."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from calm_scale.config import RunConfig
from calm_scale.config.files import FILE_WAIT_VARIABLE
from data_prep.errors import PrepError
from data_prep.prep import assemble, prepare
from data_prep.prep.journal import Journal, SegmentRecord
from data_prep.prep.prep_plan import Plan

MakeConfig = Callable[..., RunConfig]
SETTINGS = {"segment_megabytes": 0.1, "sequence_length": 128}


def show_late(monkeypatch: pytest.MonkeyPatch, suffix: str, seconds: float) -> None:
    """Of the first segment the file with this suffix is invisible to the process that joins, until it has looked for
    it for so long."""
    exists, collect = Path.exists, assemble.collect
    first_look: list[float] = []

    def late(path: Path) -> bool:
        if path.name != f"000000-000000{suffix}":
            return exists(path)
        first_look.append(time.monotonic())
        return first_look[-1] - first_look[0] >= seconds and exists(path)

    def collect_late(plan: Plan, journal: Journal) -> tuple[list[SegmentRecord], assemble.Totals]:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "exists", late)
            return collect(plan, journal)

    monkeypatch.setattr("data_prep.prep.collect", collect_late)


@pytest.mark.parametrize("suffix", [".json", ".train.tail"])
def test_what_the_workers_wrote_is_waited_for(
    tmp_path: Path,
    make_config: MakeConfig,
    kit: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
) -> None:
    corpus = kit.write_lines(tmp_path / "in.jsonl", kit.make_texts(60))
    whole = make_config(corpus, "whole", **SETTINGS)
    prepare(whole)
    late = make_config(corpus, "late", **SETTINGS)
    with monkeypatch.context() as patch:
        show_late(patch, suffix, seconds=0.5)
        prepare(late)
    assert kit.data_bytes(late.data_dir) == kit.data_bytes(whole.data_dir)


def test_a_record_that_stays_invisible_is_named_and_the_work_kept(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FILE_WAIT_VARIABLE, "0.5")
    config = make_config(kit.write_lines(tmp_path / "in.jsonl", kit.make_texts(60)), **SETTINGS)
    with monkeypatch.context() as patch:
        show_late(patch, ".json", seconds=1e9)
        with pytest.raises(
            PrepError, match=r"000000-000000\.json: a worker wrote it, and .* does not see it after 0.5 s"
        ):
            prepare(config)
    records = config.data_dir / ".prep/records"
    assert (records / "000000-000000.json").exists()
    prepare(config)
