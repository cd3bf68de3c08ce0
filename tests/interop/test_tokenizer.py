"""The tokenizer of an exported folder gives the run's ids."""

from __future__ import annotations

import base64
import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from calm_scale.config.autoencoder import AutoencoderModelConfig, ObjectiveConfig
from calm_scale.config.data import TokenizerConfig
from calm_scale.interop.files import InteropError
from calm_scale.interop.origin import check_definition, export_tokenizer, published_policy
from calm_scale.interop.settings import SPECIAL_IDS, autoencoder_config
from data_prep.errors import TokenizerError
from data_prep.tokenizer import load_tokenizer


@pytest.fixture
def source(tmp_path):
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the sea and the ship and the sea"] * 3, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_exported_tokenizer_gives_the_same_ids_with_its_bos(source, tmp_path):
    config = TokenizerConfig(encoder="tokenizers")
    out = tmp_path / "out"
    export_tokenizer(config, source, out, max_tokens=8192)
    ours = load_tokenizer(config, source)
    theirs = Tokenizer.from_file(str(out / "tokenizer.json"))
    text = "the sea, naïve"
    assert theirs.encode(text).ids == [ours.bos_id, *ours.encode(text)]
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings["bos_token"] == "<|begin_of_text|>"
    assert settings["eos_token"] == "<|end_of_text|>"
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"


@pytest.mark.parametrize("kind", ["tokenizer.json", "tiktoken ranks"])
def test_auto_tokenizer_loads_the_folder_and_gives_the_same_ids(source, tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    if kind == "tiktoken ranks":
        source = tmp_path / "tokenizer.model"
        ranks = [*(bytes([i]) for i in range(256)), b"th", b"the", b" the"]
        lines = (f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(ranks))
        source.write_text("".join(lines))
    config, out = TokenizerConfig(), tmp_path / "out"
    ids = export_tokenizer(config, source, out, max_tokens=8192)
    (out / "config.json").write_text(json.dumps({"architectures": ["EnergyTransformer"], **ids}))
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    ours = load_tokenizer(config, source)
    for text in ("the sea, naïve", "  two  spaces\n\n\ttab", "1234567 don't", "日本語 😀"):
        assert theirs(text)["input_ids"] == [ours.bos_id, *ours.encode(text)]
        assert theirs.decode(ours.encode(text)) == text
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)
    assert (ids["bos_token_id"], theirs.model_max_length) == (ours.bos_id, 8192)


def test_a_broken_definition_is_named(source):
    check_definition(source)
    source.write_text("{")
    with pytest.raises(InteropError, match=r"tokenizer\.json is not a tokenizer definition"):
        check_definition(source)


@pytest.mark.parametrize(
    "policy", [{}, {"add_bos": False}, {"add_bos": False, "add_eos": True}, {"add_eos": True}], ids=str
)
def test_the_policy_of_an_exported_folder_is_the_runs(source, tmp_path, policy):
    config = TokenizerConfig(encoder="tokenizers", **policy)
    export_tokenizer(config, source, tmp_path / "out", max_tokens=8192)
    read = published_policy(tmp_path / "out")
    assert (read.add_bos, read.add_eos) == (config.add_bos, config.add_eos)
    again = load_tokenizer(read, tmp_path / "out" / "tokenizer.json")
    assert again.fingerprint == load_tokenizer(config, source).fingerprint


def test_a_folder_whose_fast_encoder_differs_is_read_with_the_reference(source, tmp_path, monkeypatch):
    export_tokenizer(TokenizerConfig(encoder="tokenizers"), source, tmp_path / "out", max_tokens=8192)

    def differ(config, path, **_):
        if config.encoder == "auto":
            raise TokenizerError("the encoders differ")

    monkeypatch.setattr("calm_scale.interop.origin.load_tokenizer", differ)
    assert published_policy(tmp_path / "out").encoder == "tokenizers"


def test_ids_are_the_tokenizers_or_none():
    made = autoencoder_config(AutoencoderModelConfig(), ObjectiveConfig(), 128_257, 4)
    assert [made[name] for name in SPECIAL_IDS] == [None, None, None]
    ids = {"bos_token_id": 0, "eos_token_id": 7, "pad_token_id": 128_257}
    made = autoencoder_config(AutoencoderModelConfig(), ObjectiveConfig(), 128_257, 4, ids)
    assert [made[name] for name in SPECIAL_IDS] == [0, 7, None]
