"""Data is read with the encoder that made it; a tokenizer that cannot encode is refused; workers import only ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from calm_scale.config import RunConfig
from calm_scale.config.data import TokenizerConfig
from data_prep.errors import TokenizerError
from data_prep.prep import prepare
from data_prep.prep.prep_report import load_split_tokenizer, read_sequence
from data_prep.shards.manifest import Manifest
from data_prep.tokenizer import encoders, load_tokenizer

MakeConfig = Callable[..., RunConfig]


@pytest.fixture
def differing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast encoder that gives other ids than the reference."""
    encode = encoders.FastokensEncoder.encode_flat

    def other(self: encoders.FastokensEncoder, texts: list[str], *, framed: bool) -> encoders.Flat:
        ids, offsets = encode(self, texts, framed=framed)
        return np.where(ids == 300, 301, ids).astype(np.uint32), offsets

    monkeypatch.setattr(encoders.FastokensEncoder, "encode_flat", other)


@pytest.mark.usefixtures("differing")
@pytest.mark.parametrize("settings", [{"encoder": "tokenizers"}, {"on_mismatch": "fallback"}], ids=str)
def test_a_split_is_inspected_with_the_encoder_that_made_it(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace, settings: dict[str, Any]
) -> None:
    config = make_config(kit.write_lines(tmp_path / "a.jsonl", kit.make_texts(30)), tokenizer=settings)
    prepare(config)
    split = config.data_dir / "train"
    assert Manifest.read(split).provenance["tokenizer"]["encoder"] == "tokenizers"
    assert load_split_tokenizer(split).encoder_name == "tokenizers"
    assert read_sequence(split, 0, load_split_tokenizer(split)).text


@pytest.mark.usefixtures("differing")
def test_a_split_whose_manifest_does_not_say_is_read_with_the_reference(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace
) -> None:
    path = kit.write_lines(tmp_path / "a.jsonl", kit.make_texts(30))
    config = make_config(path, tokenizer={"encoder": "tokenizers"})
    prepare(config)
    split = config.data_dir / "train"
    manifest = Manifest.read(split)
    del manifest.provenance["tokenizer"]["encoder"]
    manifest.write(split)
    assert read_sequence(split, 0, load_split_tokenizer(split)).text


def test_the_manifest_does_not_bind_readers_to_a_fast_encoder(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace
) -> None:
    config = make_config(kit.write_lines(tmp_path / "a.jsonl", kit.make_texts(30)))
    report = prepare(config)
    stated = Manifest.read(config.data_dir / "train").provenance["tokenizer"]["encoder"]
    assert (report.encoder, stated) in (("fastokens", "auto"), ("tokenizers", "tokenizers"))


def _drop_bytes(definition: dict[str, Any]) -> None:
    model = definition["model"]
    for letter in ("Ā", "h"):
        del model["vocab"][letter]
    model["merges"] = [m for m in model["merges"] if not {"Ā", "h"} & set("".join(m))]


def _forget_unknown(definition: dict[str, Any]) -> None:
    definition["model"] = {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": {"a": 0, "b": 1},
    }
    definition["pre_tokenizer"], definition["decoder"] = {"type": "Whitespace"}, None


def _fall_back_on_missing_bytes(definition: dict[str, Any]) -> None:
    definition["pre_tokenizer"] = None
    definition["model"]["byte_fallback"] = True


def _know_characters_only(definition: dict[str, Any]) -> None:
    definition["pre_tokenizer"] = {"type": "Whitespace"}


def _misplace_id(definition: dict[str, Any]) -> None:
    definition["added_tokens"].append({"id": "7", "content": "<x>", "special": True})


@pytest.mark.parametrize("encoder", ["auto", "tokenizers"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop_bytes, r"byte alphabet is incomplete \(2 bytes missing: 0x00, 0x68\)"),
        (_fall_back_on_missing_bytes, r"byte alphabet is incomplete \(243 bytes missing: 0x00, 0x01.*…\)"),
        (_know_characters_only, r"made of characters and has neither an unknown token nor `byte_fallback`"),
        (_forget_unknown, r"cannot encode a text with this tokenizer.*\[UNK\]"),
        (_misplace_id, "added_tokens holds an id that is no number"),
    ],
)
def test_a_tokenizer_that_cannot_encode_every_text_is_refused_in_one_line(
    tmp_path: Path,
    make_config: MakeConfig,
    kit: SimpleNamespace,
    tokenizer_path: Path,
    change: Callable[[dict[str, Any]], None],
    message: str,
    encoder: str,
) -> None:
    definition = json.loads(tokenizer_path.read_text())
    change(definition)
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(definition))
    path = kit.write_lines(tmp_path / "a.jsonl", kit.make_texts(5))
    settings = {"path": str(broken), "encoder": encoder, "add_bos": False}
    with pytest.raises(TokenizerError, match=message, check=lambda error: error.exit_code == 2) as refused:
        prepare(make_config(path, tokenizer=settings))
    assert "\n" not in str(refused.value)


def test_missing_bytes_that_no_text_has_or_an_unknown_token_takes_are_no_fault(
    tmp_path: Path, tokenizer_path: Path
) -> None:
    definition = json.loads(tokenizer_path.read_text())
    del definition["model"]["vocab"]["\u00ff"]  # 0xFF is no byte of UTF-8
    (tmp_path / "t.json").write_text(json.dumps(definition))
    config = TokenizerConfig(encoder="tokenizers")
    assert load_tokenizer(config, tmp_path / "t.json").encode("größer")
    _drop_bytes(definition)
    definition["model"]["unk_token"] = "e"
    (tmp_path / "t.json").write_text(json.dumps(definition))
    assert load_tokenizer(config, tmp_path / "t.json").encode("the")


@pytest.mark.ranks
def test_workers_import_nothing_from_the_current_folder(
    tmp_path: Path, make_config: MakeConfig, kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for name in ("select", "random", "struct"):
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r})\n")
    monkeypatch.chdir(here)
    config = make_config(kit.write_lines(tmp_path / "a.jsonl", kit.make_texts(60)), workers=2)
    prepare(config)
    assert not (tmp_path / "imported").exists()
