"""A record format of the user's own: a package outside the product registers its reader."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from calm_scale.config import ConfigError, RunConfig
from data_prep.errors import SourceError
from data_prep.prep import foresee, prepare
from data_prep.shards.manifest import Manifest

MakeConfig = Callable[..., RunConfig]

PACKAGE = '''
import struct

def read_records(path):
    """Length-prefixed UTF-8."""
    with path.open("rb") as file:
        while head := file.read(4):
            (size,) = struct.unpack("<I", head)
            body = file.read(size)
            if len(body) < size:
                raise ValueError("the file ends inside a record")
            yield {"body": body.decode(), "meta": {"pile_set_name": "letters"}}
'''


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package ``acme_letters``, with the entry point ``letters``."""
    place = tmp_path / "site"
    (place / "acme_letters-1.0.dist-info").mkdir(parents=True)
    (place / "acme_letters.py").write_text(PACKAGE)
    (place / "acme_letters-1.0.dist-info/METADATA").write_text("Name: acme-letters\nVersion: 1.0\n")
    (place / "acme_letters-1.0.dist-info/entry_points.txt").write_text(
        "[calm_scale.document_sources]\nletters = acme_letters:read_records\n"
    )
    monkeypatch.syspath_prepend(place)


def write_letters(path: Path, texts: list[str]) -> Path:
    bodies = [text.encode() for text in texts]
    path.write_bytes(b"".join(struct.pack("<I", len(body)) + body for body in bodies))
    return path


def source(path: Path, kind: str) -> list[dict[str, object]]:
    return [{"paths": [str(path)], "kind": kind, "text_field": "body"}]


@pytest.mark.parametrize(("kind", "workers"), [("acme_letters:read_records", 2), ("letters", 1)])
def test_the_shards_are_those_of_the_same_texts_in_json_lines(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace, acme: None, kind: str, workers: int
) -> None:
    texts = kit.make_texts(120)
    letters = write_letters(tmp_path / "corpus.letters", texts)
    lines = kit.write_lines(tmp_path / "corpus.jsonl", texts)
    config = make_config([], "own", sources=source(letters, kind), workers=workers)
    report = prepare(config)
    usual = make_config(lines, "usual")
    prepare(usual)
    assert report.documents["kept"] == 120
    shards = [folder.data_dir / "train/000000-000000.shard" for folder in (config, usual)]
    assert shards[0].read_bytes() == shards[1].read_bytes()
    assert Manifest.read(config.data_dir / "train").sources[0].name == str(letters)
    assert prepare(config).already_done


def test_segments_of_a_format_without_lines_are_ranges_of_records(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace, acme: None
) -> None:
    letters = write_letters(tmp_path / "corpus.letters", kit.make_texts(120))
    settings = {"sources": source(letters, "letters"), "segment_megabytes": 0.06}
    one, two = make_config([], "one", **settings), make_config([], "two", workers=2, **settings)
    prepare(one)
    prepare(two)
    assert len(list((one.data_dir / "train").glob("0*.shard"))) > 5
    assert kit.data_bytes(one.data_dir) == kit.data_bytes(two.data_dir)


def test_what_is_wrong_is_said(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace, acme: None
) -> None:
    letters = write_letters(tmp_path / "corpus.letters", kit.make_texts(20))
    for kind, message in (
        ("acme_letters:nothing", r"prep\.sources\.kind: 'acme_letters:nothing' cannot be loaded"),
        ("no_such_package:read", r"cannot be loaded .*install the package"),
        ("lettres", r"'lettres' is not registered .*\(registered: letters\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            foresee(make_config([], sources=source(letters, kind)))
    named = [{**source(letters, "letters")[0], "text_field": "text"}]
    with pytest.raises(
        SourceError,
        match=r"has no field 'text': \['body', 'meta'\]",
        check=lambda error: error.exit_code == 2,
    ):
        prepare(make_config([], sources=named))
    letters.write_bytes(letters.read_bytes()[:-3])
    with pytest.raises(SourceError, match=r"corpus\.letters .*at row 20: the file ends inside a record"):
        prepare(make_config([], "cut", sources=source(letters, "letters")))
