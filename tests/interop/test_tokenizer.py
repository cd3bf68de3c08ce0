"""The tokenizer of an exported folder gives the run's ids."""

from __future__ import annotations

import base64
import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from calm_scale.config.data import TokenizerConfig
from calm_scale.interop.files import InteropError
from calm_scale.interop.tokenizer import check_definition, export_tokenizer
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
