"""The tokenizer of an exported folder gives the run's ids."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from calm_scale.config.data import TokenizerConfig
from calm_scale.interop.tokenizer import export_tokenizer
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
