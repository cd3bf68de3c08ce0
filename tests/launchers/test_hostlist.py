"""Host lists: the fallback gives what scontrol gives, for every bracket form."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from launchers import claims as hostlist
from launchers.errors import LaunchError

FORMS = [
    ("n1", ["n1"]),
    ("n[01-04]", ["n01", "n02", "n03", "n04"]),
    ("n[1,3]", ["n1", "n3"]),
    ("a,b,c", ["a", "b", "c"]),
    ("nodeA,nodeB[001,003],nodeC", ["nodeA", "nodeB001", "nodeB003", "nodeC"]),
    ("rack[0-1]_blade[0-1]", ["rack0_blade0", "rack0_blade1", "rack1_blade0", "rack1_blade1"]),
    ("gpu-a-[1-2],gpu-b-7", ["gpu-a-1", "gpu-a-2", "gpu-b-7"]),
    (
        "n[008-011,99].site.org",
        ["n008.site.org", "n009.site.org", "n010.site.org", "n011.site.org", "n99.site.org"],
    ),
]


@pytest.mark.parametrize(("text", "hosts"), FORMS)
def test_fallback_expands_every_form(text: str, hosts: list[str]) -> None:
    assert hostlist.expand_here(text) == hosts


@pytest.mark.parametrize(("text", "hosts"), FORMS)
def test_first_host_without_scontrol(text: str, hosts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert hostlist.first(text) == hosts[0]


def test_scontrol_answers_where_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stub(tmp_path, "echo from-scontrol")
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    assert hostlist.expand("n[1-2]") == ["from-scontrol"]


def test_scontrol_without_a_configuration_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stub(tmp_path, "echo fatal >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    assert hostlist.expand("n[1-2]") == ["n1", "n2"]


@pytest.mark.parametrize("text", ["", "  ", "n[1-", "n]1[", "n[[1]]", "n[a-b]", "n[3-1]", "n 1", "n[]", ","])
def test_malformed_lists_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LaunchError, match="host list"):
        hostlist.expand(text)


def test_counts_of_tasks_per_node() -> None:
    assert hostlist.expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert hostlist.expand_counts("4") == [4]
    with pytest.raises(LaunchError, match="tasks-per-node"):
        hostlist.expand_counts("2x3")


def _stub(folder: Path, body: str) -> None:
    script = folder / "scontrol"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
