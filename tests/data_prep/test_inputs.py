"""What a source's paths name: nothing that holds text is left out in silence, and nothing is named twice."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from calm_scale.config.data import SourceConfig
from data_prep import inputs
from data_prep.errors import SourceError
from data_prep.inputs import list_inputs

RECORD = b'{"text": "a"}\n'


def write(path: Path, data: bytes = RECORD) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def names(*patterns: Path | str) -> list[str]:
    """The inputs of one source."""
    return names_and_lines(*patterns)[0]


def names_and_lines(*patterns: Path | str) -> tuple[list[str], list[str]]:
    """The inputs of one source, and the lines for the user."""
    told: list[str] = []
    found = list_inputs((SourceConfig(paths=tuple(map(str, patterns))),), told.append)
    return [item.name for item in found], told


def listed(*sources: dict[str, Any]) -> list[str]:
    """The inputs of several sources."""
    return [item.name for item in list_inputs(tuple(map(SourceConfig.model_validate, sources)))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """``in/a.jsonl`` and ``in/sub/b.jsonl``."""
    write(tmp_path / "in/a.jsonl")
    write(tmp_path / "in/sub/b.jsonl")
    return tmp_path / "in"


def test_every_kind_of_lines_is_read_in_every_compression(tmp_path: Path) -> None:
    ends = [f"{lines}{end}" for lines in ("jsonl", "JSON", "ndjson") for end in ("", ".zst", ".ZSTD", ".gz")]
    files = sorted(
        write(tmp_path / f"in/{number:02d}.{end}") for number, end in enumerate([*ends, "parquet"])
    )
    assert names(tmp_path / "in") == names(tmp_path / "in/*") == list(map(str, files))
    assert [names(file) for file in files] == [[str(file)] for file in files]


def test_a_linked_folder_is_entered_and_a_loop_ends(tmp_path: Path, folder: Path) -> None:
    write(tmp_path / "elsewhere/c.jsonl")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "sub/loop").symlink_to(folder)
    (tmp_path / "elsewhere/back").symlink_to(folder / "sub")
    expected = [str(folder / name) for name in ("a.jsonl", "link/back/b.jsonl", "link/c.jsonl")]
    assert names(folder) == names(folder / "*") == names(folder / "**") == expected


def test_a_folder_that_a_glob_matches_is_entered(folder: Path) -> None:
    write(folder / "sub/deep/c.jsonl")
    write(folder / "sub/.hidden/d.jsonl")
    expected = [str(folder / name) for name in ("a.jsonl", "sub/b.jsonl", "sub/deep/c.jsonl")]
    assert names(folder / "*") == names(folder) == names(folder / "**") == expected
    assert names(folder / "s*") == expected[1:]
    assert names(folder / "*/**/[bc].jsonl") == names(folder / "**/[bc].jsonl") == expected[1:]
    assert names(folder / "sub/.h*/*") == [str(folder / "sub/.hidden/d.jsonl")]
    for pattern in ("none/**/*.jsonl", "none/*", "a.jsonl/*", "*/a.jsonl", "**/none.jsonl"):
        with pytest.raises(
            SourceError, match="nothing readable matches", check=lambda error: error.exit_code == 2
        ):
            names(folder / pattern)


@pytest.mark.parametrize("pattern", ["in", "in/*", "in/x.jsonl", "in/**/*.jsonl", "in/*/*.jsonl"])
def test_a_link_that_leads_nowhere_is_named(tmp_path: Path, folder: Path, pattern: str) -> None:
    (folder / "x.jsonl").symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(
        SourceError,
        match=r"in/x\.jsonl is a link to .*/gone\.jsonl, which is not there",
        check=lambda error: error.exit_code == 2,
    ):
        names(tmp_path / pattern)


def test_a_link_to_itself_is_named(folder: Path) -> None:
    (folder / "x.jsonl").symlink_to(folder / "x.jsonl")
    with pytest.raises(
        SourceError,
        match=r"in/x\.jsonl cannot be read: Too many levels",
        check=lambda error: error.exit_code == 2,
    ):
        names(folder)


def test_a_pipe_is_named(folder: Path) -> None:
    os.mkfifo(folder / "x.jsonl")
    with pytest.raises(
        SourceError, match=r"in/x\.jsonl is no regular file", check=lambda error: error.exit_code == 2
    ):
        names(folder)


@pytest.mark.parametrize("pattern", ["in", "in/*", "in/*/*.jsonl", "in/**/b.jsonl"])
def test_a_folder_that_cannot_be_read_is_named(
    tmp_path: Path, folder: Path, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listdir = os.listdir

    def refuse(path: Path) -> list[str]:
        if Path(path) == folder / "sub":
            raise PermissionError(13, "Permission denied")
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refuse)  # a mode would not stop a superuser
    with pytest.raises(
        SourceError,
        match=r"the folder .*in/sub cannot be read: Permission denied",
        check=lambda error: error.exit_code == 2,
    ):
        names(tmp_path / pattern)


@pytest.mark.parametrize("pattern", ["in", "in/*"])
def test_files_of_no_known_extension_are_told_once_a_source(
    tmp_path: Path, folder: Path, pattern: str
) -> None:
    assert names_and_lines(tmp_path / pattern)[1] == []
    for name in ("README.md", "b.txt", "sub/c.jsonl.xz", "sub/d.csv", ".hidden.txt"):
        write(folder / name)
    found, lines = names_and_lines(tmp_path / pattern, folder)
    assert len(found) == 2
    (said,) = lines
    start = (
        f"prep.sources[0]: 4 files ({folder}/README.md, {folder}/b.txt, {folder}/sub/c.jsonl.xz, …) left out"
    )
    assert said.startswith(start)
    with pytest.raises(
        SourceError,
        match=r"nothing readable matches .*1 file \(.*README\.md\) of no known",
        check=lambda error: error.exit_code == 2,
    ):
        names(folder / "R*")


@pytest.mark.parametrize("name", [b"caf\xe9.jsonl", b"caf\xe9/a.jsonl"])
def test_a_name_that_is_not_utf_8_is_refused(
    tmp_path: Path, name: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in/a.jsonl")
    try:
        write(tmp_path / "in" / os.fsdecode(name))
    except OSError:
        pytest.skip("this file system has no such names")
    for source in ({"paths": [str(tmp_path / "in")]}, {"paths": [str(tmp_path / "in/*")]}):
        with pytest.raises(
            SourceError,
            match=r"in/caf\\xe9.* is not UTF-8.*rename it",
            check=lambda error: error.exit_code == 2,
        ):
            listed(source)
    with pytest.raises(
        SourceError, match=r"in/caf\\xe9.* is not UTF-8.*rename it", check=lambda error: error.exit_code == 2
    ):
        listed({"dataset": str(tmp_path / "in")})
    assert capsys.readouterr().err == ""


def test_a_left_out_file_may_have_any_name(tmp_path: Path) -> None:
    write(tmp_path / "in/a.jsonl")
    try:
        write(tmp_path / "in" / os.fsdecode(b"caf\xe9.txt"))
    except OSError:
        pytest.skip("this file system has no such names")
    found, lines = names_and_lines(tmp_path / "in")
    assert len(found) == 1
    assert r"in/caf\xe9.txt" in lines[0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"paths": [""]}, "holds an empty path"),
        ({"dataset": ""}, "holds an empty path"),
        ({"paths": ["a\0b"]}, "nothing readable matches"),
        ({"paths": ["a" * 5000]}, "cannot be read: File name too long"),
        ({"paths": ["x"], "text_field": "meta", "include_sets": ["A"]}, "text_field is `meta`"),
        ({"paths": ["x"], "text_field": "meta", "exclude_sets": ["A"]}, "text_field is `meta`"),
    ],
)
def test_what_cannot_be_meant_is_a_mistake(source: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message, check=lambda error: error.exit_code == 2):
        listed(source)


def test_a_file_named_twice_is_read_once_or_refused(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "other.jsonl").symlink_to(folder / "a.jsonl")
    assert len(names(folder, folder / "a.jsonl", tmp_path / "other.jsonl")) == 2
    with pytest.raises(
        SourceError,
        match=r"other\.jsonl belongs to two sources \(0 and 1\)",
        check=lambda error: error.exit_code == 2,
    ):
        listed({"paths": [str(folder)]}, {"paths": [str(tmp_path / "other.jsonl")]})


def save(folder: Path, *splits: str) -> str:
    """A saved dataset, with these splits if any."""
    import datasets

    table = datasets.Dataset.from_dict({"text": ["a"]})
    (datasets.DatasetDict(dict.fromkeys(splits, table)) if splits else table).save_to_disk(str(folder))
    return str(folder)


def test_a_dataset_named_twice_is_refused(tmp_path: Path, folder: Path, kit: SimpleNamespace) -> None:
    one, many = save(tmp_path / "ds"), save(tmp_path / "dd", "train", "test")
    (tmp_path / "link").symlink_to(tmp_path / "ds")
    twice: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"dataset": one}, {"dataset": one}),
        ({"dataset": one}, {"dataset": f"{one}/"}),
        ({"dataset": one}, {"dataset": str(tmp_path / "link")}),
        ({"dataset": one}, {"dataset": one, "split": "test"}),  # it has one split, whatever its name
        ({"dataset": many}, {"dataset": f"{many}/train"}),
        ({"dataset": str(folder)}, {"paths": [str(folder)]}),
        ({"dataset": str(folder), "split": "test"}, {"paths": [str(folder / "sub/*.jsonl")]}),
        ({"paths": [str(folder / "a.jsonl")]}, {"dataset": str(folder)}),
    ]
    for sources in twice:
        with pytest.raises(
            SourceError,
            match=r"belongs to two sources \(0 and 1\).*name it once",
            check=lambda error: error.exit_code == 2,
        ):
            listed(*sources)
    for path in (many, str(folder)):
        assert listed({"dataset": path}, {"dataset": path, "split": "test"}) == [path, path]
    assert len(listed({"dataset": many}, {"dataset": f"{many}/test"})) == 2
    assert len(listed({"dataset": one}, {"dataset": many}, {"paths": [str(folder)]})) == 4


def test_a_name_on_a_hub_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    commits = {"org/a": "1" * 40, "a": "1" * 40, "org/b": "2" * 40, "org/c": "", "org/d": ""}
    monkeypatch.setattr(inputs, "commit_of", lambda name, split: commits[name])
    for first, second in (("org/a", "org/a"), ("org/a", "a"), ("org/c", "org/c")):
        with pytest.raises(
            SourceError,
            match=rf"'{second}' \(split 'train'\) belongs to two sources",
            check=lambda error: error.exit_code == 2,
        ):
            listed({"dataset": first}, {"dataset": second})
        assert len(listed({"dataset": first}, {"dataset": second, "split": "test"})) == 2
    assert len(listed(*({"dataset": name} for name in ("org/a", "org/b", "org/c", "org/d")))) == 4
