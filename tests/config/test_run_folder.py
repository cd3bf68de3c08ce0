"""A stored document is that of the folder it lies in: from any current folder, and after the run was moved."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from calm_scale.config import ConfigError, RunConfig, load, to_yaml


def _stored(folder: Path, **values: object) -> Path:
    """A run folder as a command leaves it, holding a resolved document with these values."""
    (folder / "lm").mkdir(parents=True)
    run = RunConfig.model_validate({"name": "run", "vocab_size": 512, **values})
    (folder / "config.yaml").write_text(to_yaml(run), encoding="utf-8")
    return folder


def test_a_relative_workdir_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _stored(
        tmp_path / "runs" / "rel", workdir="runs/rel", tokenizer={"path": "tok.json"}, data="shared/data"
    )
    monkeypatch.chdir(tmp_path)
    here = load("runs/rel")
    assert (here.workdir, here.tokenizer.path) == (Path("runs/rel"), Path("tok.json"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for named in (Path("../runs/rel"), Path("../runs/rel/config.yaml"), folder):
        run = load(named)
        assert run.workdir.resolve() == folder
        assert run.tokenizer.path == tmp_path / "tok.json"
        assert run.data == tmp_path / "shared" / "data"


def test_a_moved_run_is_itself_although_its_old_folder_exists(tmp_path: Path) -> None:
    old = tmp_path / "old"
    _stored(old, workdir=old, tokenizer={"path": old / "tokenizer.json"}, data="/somewhere/else")
    shutil.copytree(old, tmp_path / "new")
    run = load(tmp_path / "new" / "config.yaml")
    assert run.workdir == tmp_path / "new"
    assert run.tokenizer_path == tmp_path / "new" / "tokenizer.json"
    assert run.data == Path("/somewhere/else")
    assert load(tmp_path / "new", ["workdir=/asked"]).workdir == Path("/asked")
    assert load(old).workdir == old


def test_a_document_of_a_users_keeps_its_workdir(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    mine = tmp_path / "config.yaml"
    mine.write_text("name: mine\nworkdir: runs/mine\n", encoding="utf-8")
    assert load(mine).workdir == Path("runs/mine")
    resolved = tmp_path / "elsewhere" / "config.yaml"  # what `config show > config.yaml` makes
    resolved.parent.mkdir()
    resolved.write_text(to_yaml(load(mine)), encoding="utf-8")
    assert load(resolved).workdir == Path("runs/mine")


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a run folder, it holds no config\.yaml"):
        load(tmp_path)
