"""`calm-scale prep verify | inspect | compress | expand | export-megatron` as people call them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from calm_scale.cli.app import main
from calm_scale.config import RunConfig
from calm_scale.stages.prep import verify_shards
from calm_scale.stages.prep_display import show_split
from data_prep.prep import prepare
from data_prep.prep.prep_report import store_definition
from data_prep.shards.manifest import Manifest

Prep = Callable[..., tuple[int, str]]


@pytest.fixture
def prep(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Prep:
    """``prep(*arguments)`` runs the command: its exit code and what it printed, in one line."""

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["calm-scale", "prep", *map(str, arguments)])
        capsys.readouterr()
        code: object = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        assert isinstance(code, int)
        captured = capsys.readouterr()
        return code, " ".join((captured.out + captured.err).split())

    return run


@pytest.fixture
def make_data(
    make_config: Callable[..., RunConfig], tmp_path: Path, kit: SimpleNamespace
) -> Callable[..., Path]:
    """``make_data(workdir="run", name="in")``: a finished data folder of ``<name>.jsonl``."""

    def build(workdir: str = "run", name: str = "in") -> Path:
        path = kit.write_lines(tmp_path / f"{name}.jsonl", kit.make_texts(60))
        config = make_config(path, workdir=workdir, splits={"heldout": 0.2})
        prepare(config)
        return config.data_dir

    return build


def test_a_path_is_no_markup(
    prep: Prep, make_data: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_data(workdir="[red]run[/b]:smile:", name="in[/i]")
    train = data / "train"
    for command in ("inspect", "verify", "compress", "expand"):
        code, said = prep(command, train)
        assert code == 0, said
        assert "[red]run[/b]:smile:/data/train" in said.replace(" ", "")
    code, said = prep("export-megatron", train, data / "[/b]")
    assert (code, f"{data}/[/b].bin" in said) == (0, True)
    assert prep("inspect", train, "--picture", data / "[/b].png")[0] == 0
    show_split(train, Manifest.read(train), Console(width=400))
    assert verify_shards(data) == 0
    shown = capsys.readouterr().out.replace("\n", "").replace(" ", "")
    assert "in[/i].jsonl" in shown
    assert "[red]run[/b]" in shown


@pytest.mark.parametrize("command", ["inspect", "compress", "expand", "export-megatron"])
def test_a_folder_of_splits_is_told_from_a_split(
    prep: Prep, make_data: Callable[..., Path], tmp_path: Path, command: str
) -> None:
    data = make_data()
    more = (tmp_path / "pair",) if command == "export-megatron" else ()
    for folder in (data, data.parent):
        code, said = prep(command, folder, *more)
        assert code == 2
        assert f"{folder} is no split; name one of those in it: {data}/heldout, {data}/train" in said
    assert not list(data.rglob("*.zst"))


def test_what_is_compressed_or_expanded_already_is_said_to_be(
    prep: Prep, make_data: Callable[..., Path]
) -> None:
    train = make_data() / "train"
    assert prep("expand", train) == (0, f"{train}: nothing to do, every shard is expanded")
    assert prep("compress", train) == (0, f"{train}: 1 shard compressed")
    assert prep("compress", train) == (0, f"{train}: nothing to do, every shard is compressed")
    assert prep("expand", train) == (0, f"{train}: 1 shard expanded")


def test_a_picture_has_a_format_that_can_be_drawn(
    prep: Prep, make_data: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = make_data() / "train"
    code, said = prep("inspect", train, "--picture", tmp_path / "x.foo")
    assert (code, ".foo is no format that can be drawn; use one of png, pdf, svg" in said) == (2, True)
    assert "fingerprint" not in said
    code, said = prep("inspect", train, "--picture", tmp_path)
    assert (code, "is a folder; name a file in it" in said) == (2, True)
    for given, written in (("a.SVG", "a.SVG"), ("b", "b.png"), ("c.v2.pdf", "c.v2.pdf")):
        code, said = prep("inspect", train, "--picture", tmp_path / given)
        assert (code, said.endswith(f"picture: {tmp_path / written}")) == (0, True), said
        assert (tmp_path / written).stat().st_size > 2000
    assert (tmp_path / "a.SVG").read_bytes().startswith(b"<?xml")

    def fill(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fill)
    code, said = prep("inspect", train, "--picture", tmp_path / "d.png")
    assert (code, f"{tmp_path / 'd.png'}: no space left" in said) == (1, True), said
    assert not list(tmp_path.glob("d.png*"))


def test_a_copy_of_the_tokenizer_that_fails_leaves_no_part(
    tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fill)
    with pytest.raises(OSError, match="No space") as raised:
        store_definition(tokenizer_path, tmp_path)
    assert raised.value.filename == str(tmp_path / "tokenizer.json")
    assert not list(tmp_path.glob("tokenizer*"))


DAMAGES = {
    "cut": (lambda text: text[:-40], "is damaged, not the manifest of a prep"),
    "emptied": (lambda text: "", "is damaged, not the manifest of a prep"),
    "tokens": (
        lambda text: text.replace('"bos": ', '"bos": 1', 1),
        "its tokens are not the sum over its splits",
    ),
    "documents": (lambda text: text.replace('"read": ', '"read": 1', 1), "its documents do not add up"),
    "a split": (
        lambda text: text.replace('"padding": ', '"padding": 1', 2),
        "its numbers of split ",
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_verify_finds_a_damaged_manifest_of_the_prep(
    prep: Prep, make_data: Callable[..., Path], case: str
) -> None:
    damage, message = DAMAGES[case]
    data = make_data()
    assert prep("verify", data)[0] == 0
    path = data / "manifest.json"
    path.write_text(damage(path.read_text()))
    for folder in (data, data.parent):
        code, said = prep("verify", folder)
        assert (code, f"{data}: DAMAGED" in said, f"{path}" in said, message in said) == (
            1,
            True,
            True,
            True,
        ), said
    assert prep("verify", data / "train")[0] == 0
