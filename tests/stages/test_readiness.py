"""Splits made ready on two ranks: one copies for its node, both get the verdict; a flipped byte is noticed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from calm_scale.cli.app import main

PROGRAM = Path(__file__).with_name("readiness_program.py")


@pytest.fixture
def prepared(write_document: Callable, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The document of a run whose shards are there."""
    run = write_document("ready")
    document = yaml.safe_load(run.document.read_text())
    document["prep"] |= {"segment_megabytes": 0.05}
    run.document.write_text(yaml.safe_dump(document))
    monkeypatch.setattr("sys.argv", ["calm-scale", "prep", str(run.document)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code
    return run.document


@pytest.mark.ranks
def test_two_ranks_share_a_copy_and_a_verdict(
    prepared: Path, run_ranks: Callable[..., list[tuple[int, str, str]]]
) -> None:
    ended = run_ranks(PROGRAM, str(prepared), LOCAL_WORLD_SIZE="2")
    assert [code for code, _, _ in ended] == [0, 0], ended
    first, second = (json.loads(out.splitlines()[-1]) for _, out, _ in ended)
    assert first == second
    checked, staged, again, unset, inside, full, flipped, arrived = first
    assert checked.split()[1] == staged.split()[1] == again.split()[1]
    assert "/run/data/train " in checked
    assert "/run/local/train-" in staged
    assert again == staged  # a spoilt copy is replaced
    assert "NO_SUCH_VARIABLE" in unset
    assert unset.startswith("ConfigError")
    assert inside.startswith("ConfigError: reading.stage_to: ")
    assert " kB are still to be copied, 0 bytes are free" in full
    assert "do not fit their checksum" in flipped
    assert "arrived damaged" in arrived
    told = ended[0][2]
    assert "staged to" in told
    assert "MB copied and checked in" in told
    assert ended[1][2] == ""
