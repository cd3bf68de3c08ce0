"""Tokenizers: exact ids, special-token policy, verified encoders."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import data_prep.tokenizer
from calm_scale.config import RunConfig
from calm_scale.config.data import TokenizerConfig
from data_prep.errors import EncoderMismatchError, TokenizerError
from data_prep.prep import prepare
from data_prep.tokenizer import load_tokenizer
from data_prep.tokenizer.definition import read_spec
from data_prep.tokenizer.encoders import FastokensEncoder

HARD = [
    "",
    " ",
    "a\n\n b",
    "<|end_of_text|>x<|pad|>",
    "é字👍🏽\u2028",
    "don't 12345 !=",
    "\x00\x01",
    "\t\t  x" * 50,
]


@pytest.fixture(scope="session")
def ranks_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small file of tiktoken ranks: all bytes, then some pairs and words."""
    tokens = [bytes([b]) for b in range(256)]
    tokens += [
        b"th",
        b"he",
        b"in",
        b" t",
        b" a",
        b"er",
        b"the",
        b" the",
        b"  ",
        b"    ",
        b"ing",
        b" then",
        b"00",
    ]
    path = tmp_path_factory.mktemp("ranks") / "tokenizer.model"
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))
    return path


@pytest.mark.parametrize("encoder", ["auto", "fastokens", "tokenizers"])
def test_text_comes_back_byte_for_byte(tokenizer_path: Path, encoder: str) -> None:
    tokenizer = load_tokenizer(TokenizerConfig(encoder=encoder), tokenizer_path)
    for text in HARD:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("encoder", ["fastokens", "tiktoken", "tokenizers"])
def test_tiktoken_ranks_give_the_same_ids_in_every_encoder(ranks_path: Path, encoder: str) -> None:
    tokenizer = load_tokenizer(TokenizerConfig(encoder=encoder), ranks_path)
    assert tokenizer.encoder_name == encoder
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (269, 270, 273)
    assert tokenizer.vocab_size == 269 + 256
    assert tokenizer.encode(" then the 000") == [267, 263, 32, 268, 48]
    reference = load_tokenizer(TokenizerConfig(encoder="tiktoken"), ranks_path)
    assert tokenizer.encode_batch(HARD) == reference.encode_batch(HARD)
    assert tokenizer.fingerprint == reference.fingerprint
    for text in HARD:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tiktoken_survives_the_run_it_panics_on(ranks_path: Path) -> None:
    tokenizer = load_tokenizer(TokenizerConfig(encoder="tiktoken"), ranks_path)
    text = " " * 1_000_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (True, True), (False, True), (False, False)])
@pytest.mark.parametrize("encoder", ["fastokens", "tiktoken", "tokenizers"])
def test_the_exact_framing_by_policy(ranks_path: Path, bos: bool, eos: bool, encoder: str) -> None:
    tokenizer = load_tokenizer(TokenizerConfig(encoder=encoder, add_bos=bos, add_eos=eos), ranks_path)
    texts = ["the", "", "a<|end_of_text|>"]
    ids, offsets = tokenizer.encode_documents(texts)
    for i, text in enumerate(texts):
        expected = [269] * bos + tokenizer.encode(text) + [270] * eos
        assert ids[offsets[i] : offsets[i + 1]].tolist() == expected
    assert 270 not in tokenizer.encode("a<|end_of_text|>")


def test_the_fingerprint_is_of_behaviour(tokenizer_path: Path, ranks_path: Path) -> None:
    def fingerprint(path: Path, **settings: object) -> str:
        return load_tokenizer(TokenizerConfig(**settings), path).fingerprint

    same = fingerprint(tokenizer_path)
    assert fingerprint(tokenizer_path, encoder="tokenizers") == same
    others = {
        fingerprint(tokenizer_path, add_eos=True),
        fingerprint(tokenizer_path, add_bos=False),
        fingerprint(tokenizer_path, pad_token="<|more|>"),
        fingerprint(ranks_path),
    }
    assert len(others) == 4
    assert same not in others


def test_a_pad_token_the_tokenizer_lacks_takes_the_next_id(tokenizer_path: Path) -> None:
    tokenizer = load_tokenizer(TokenizerConfig(pad_token="[PAD]"), tokenizer_path)
    assert (tokenizer.pad_id, tokenizer.max_id, tokenizer.vocab_size) == (400, 400, 401)
    assert tokenizer.decode([*tokenizer.encode("ab"), 400, 400]) == "ab"


def test_settings_of_inference_do_not_cut_documents(tmp_path: Path, tokenizer_path: Path) -> None:
    definition = json.loads(tokenizer_path.read_text())
    definition["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    definition["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    a = load_tokenizer(TokenizerConfig(), tokenizer_path)
    b = load_tokenizer(TokenizerConfig(), tmp_path)
    assert a.encode("the energy of the latent") == b.encode("the energy of the latent")


def test_clear_errors(tmp_path: Path, tokenizer_path: Path) -> None:
    for path, text in (
        (tmp_path / "none.json", "there is no tokenizer at"),
        (tmp_path, "neither tokenizer.json nor tokenizer.model"),
    ):
        with pytest.raises(TokenizerError, match=text):
            load_tokenizer(TokenizerConfig(), path)
    (tmp_path / "bad.model").write_bytes(b"\x0a\x12\x03abc not ranks at all\n")
    with pytest.raises(TokenizerError, match=r"bad\.model:1 is not a line of tiktoken ranks"):
        load_tokenizer(TokenizerConfig(), tmp_path / "bad.model")
    for content, text in (
        ('{"model"', r"bad\.json is not a tokenizer\.json"),
        ("{}", r"bad\.json is not a tokenizer\.json: it has no `model` with a `vocab`"),
        ('{"model": {"vocab": {}}}', r"bad\.json: its vocabulary is empty"),
    ):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(TokenizerError, match=text):
            load_tokenizer(TokenizerConfig(), tmp_path / "bad.json")
    with pytest.raises(TokenizerError, match=r"bos_token '<s>' is no special token.*<\|begin_of_text\|>"):
        load_tokenizer(TokenizerConfig(bos_token="<s>"), tokenizer_path)
    definition = json.loads(tokenizer_path.read_text())
    definition["added_tokens"] = []
    (tmp_path / "plain.json").write_text(json.dumps(definition))
    with pytest.raises(TokenizerError, match=r"no BOS token.*add_bos: false"):
        load_tokenizer(TokenizerConfig(), tmp_path / "plain.json")
    assert load_tokenizer(TokenizerConfig(add_bos=False), tmp_path / "plain.json").bos_id is None


class LyingEncoder(FastokensEncoder):
    """Drops the last id of every text that contains ``word``."""

    word = "\u2028"

    def encode_flat(self, texts: list[str], *, framed: bool):
        ids, offsets = super().encode_flat(texts, framed=framed)
        pieces = [ids[offsets[i] : offsets[i + 1] - (self.word in text)] for i, text in enumerate(texts)]
        return np.concatenate(pieces), np.concatenate([[0], np.cumsum([len(p) for p in pieces])])


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def install(word: str) -> None:
        build = data_prep.tokenizer.build_encoder
        monkeypatch.setattr(LyingEncoder, "word", word)
        monkeypatch.setattr(
            data_prep.tokenizer,
            "build_encoder",
            lambda name, spec: LyingEncoder(spec.json) if name == "fastokens" else build(name, spec),
        )

    return install


def test_an_encoder_that_fails_the_probe_is_not_used(
    tokenizer_path: Path, lying: Callable[[str], None]
) -> None:
    lying("\u2028")
    with pytest.raises(TokenizerError, match=r"fastokens and tokenizers differ on .*\\u2028"):
        load_tokenizer(TokenizerConfig(), tokenizer_path)
    tokenizer = load_tokenizer(TokenizerConfig(on_mismatch="fallback"), tokenizer_path)
    assert tokenizer.encoder_name == "tokenizers"
    assert "differ" in (tokenizer.warning or "")


def test_an_encoder_that_fails_on_the_corpus_stops_or_falls_back(
    tmp_path: Path, make_config: Callable[..., RunConfig], kit: SimpleNamespace, lying: Callable[[str], None]
) -> None:
    texts = kit.make_texts(50)
    path = kit.write_lines(tmp_path / "a.jsonl", [f"{t} zyzzyva" for t in texts])
    honest = make_config(path, workdir="honest")
    prepare(honest)
    lying("zyzzyva")
    with pytest.raises(EncoderMismatchError, match=r"fastokens and tokenizers differ on .*from id \d+ on"):
        prepare(make_config(path, workdir="stop"))
    config = make_config(path, workdir="back", tokenizer={"on_mismatch": "fallback"})
    report = prepare(config)
    assert report.encoder == "tokenizers"
    shard = "train/000000-000000.shard"
    assert (config.data_dir / shard).read_bytes() == (honest.data_dir / shard).read_bytes()


@pytest.mark.parametrize("text", ["a" * 1_000_000, " " * 1_000_000])
def test_the_fast_encoder_equals_the_reference_on_long_runs(tokenizer_path: Path, text: str) -> None:
    """Encoders have panicked or differed on runs of 1 MB; the probe at run time holds only short ones."""
    fast = load_tokenizer(TokenizerConfig(encoder="fastokens"), tokenizer_path)
    assert fast.encoder_name == "fastokens"
    fast.check([text])


def test_the_definition_of_ranks_has_every_merge(ranks_path: Path) -> None:
    spec = read_spec(TokenizerConfig(), ranks_path)
    merges = json.loads(spec.json)["model"]["merges"]
    assert merges.count("t he") == 1
    assert merges.count("th e") == 1
    assert spec.specials["<|begin_of_text|>"] == 269
