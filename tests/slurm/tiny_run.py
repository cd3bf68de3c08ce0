"""A corpus, a tokenizer and a run so small that every real stage takes seconds.

``python tiny_run.py FOLDER`` writes ``text.jsonl`` and ``tokenizer.json`` there.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

VOCABULARY = 300


def write_corpus(folder: Path, documents: int = 300) -> None:
    """Sentences of a few words, so that a byte-level tokenizer of 300 ids has something to merge."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    words = ["the", "sea", "wind", "stone", "carries", "over", "under", "light", "and", "a", "ship"]
    draw = random.Random(0)
    texts = [" ".join(draw.choice(words) for _ in range(60)) + f" {index}." for index in range(documents)]
    lines = [json.dumps({"text": text, "meta": {"pile_set_name": "Tiny"}}) for text in texts]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def tiny_config(corpus: Path, steps: int = 6, interval: int = 1000) -> dict[str, Any]:
    """Values of a run over that corpus: autoencoder on 2 ranks, language model at tensor parallel 2."""
    training: dict[str, Any] = {
        "steps": steps,
        "global_batch": 4,
        "micro_batch": 2,
        "precision": "fp32",
        "eval_interval": 1000,
        "eval_samples": 4,
        "checkpoint": {"interval": interval},
        "optimizer": {"schedule": {"warmup_steps": 2}},
    }
    return {
        "vocab_size": VOCABULARY,
        "patch_size": 2,
        "tokenizer": {"path": str(corpus / "tokenizer.json")},
        "prep": {
            "sources": [{"paths": [str(corpus / "text.jsonl")]}],
            "splits": {"heldout": 0.1},
            "sequence_length": 32,
        },
        "autoencoder": {
            "patches": 16,
            "model": {"latent_size": 8, "hidden_size": 16, "ffn_size": 32},
            "training": training,
            "zero": {"data": 2},
        },
        "lm": {
            "backbone": {"num_layers": 2, "hidden_size": 16, "ffn_size": 32, "num_heads": 2, "positions": 16},
            "head": {
                "kind": "energy",
                "num_blocks": 1,
                "noise_size": 4,
                "num_samples": 2,
                "num_posterior": 4,
            },
            "training": training,
            "parallel": {"tensor": 2, "data": 1},
        },
        "evaluation": {"max_sequences": 4},
        "logging": {"wandb": "disabled", "progress": False, "interval": 1},
    }


if __name__ == "__main__":
    write_corpus(Path(sys.argv[1]))
