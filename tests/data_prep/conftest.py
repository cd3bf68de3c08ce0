"""Tiny corpora, a tiny tokenizer, and run configurations for the data_prep tests."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zstandard

from calm_scale.config import RunConfig
from data_prep.shards.manifest import Manifest
from data_prep.shards.reading import ShardDataset
from data_prep.tokenizer.definition import train_bpe

WORDS = re.split(
    " ",
    "the a of energy patch token model score latent brier encoder stream shard größer Straße naïve 模型 данные "
    "def return lambda 1234 3.14 != <= ... (x) [y] don't we'll",
)


def make_texts(count: int, seed: int = 0, words: int = 60) -> list[str]:
    """``count`` distinct texts of 1 to 2 · ``words`` words."""
    draw = random.Random(seed)
    return [
        f"{i} " + " ".join(draw.choices(WORDS, k=draw.randint(1, 2 * words))) + draw.choice(["", "\n", "  "])
        for i in range(count)
    ]


def write_lines(path: Path, texts: list[str]) -> Path:
    """Write Pile-format records, compressed as the extension says."""
    data = b"".join(json.dumps({"text": t, "meta": {"pile_set_name": "T"}}).encode() + b"\n" for t in texts)
    if path.name.lower().endswith(".zst"):
        data = zstandard.ZstdCompressor(write_checksum=True).compress(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 400 ids."""
    folder = tmp_path_factory.mktemp("tokenizer")
    corpus = write_lines(folder / "c.jsonl", make_texts(200))
    return train_bpe([corpus], 400, folder / "tokenizer.json")


@pytest.fixture
def make_config(tmp_path: Path, tokenizer_path: Path) -> Callable[..., RunConfig]:
    """``make_config(paths, workdir="run", tokenizer={}, **prep)``."""

    def build(
        paths: list[Path] | Path, workdir: str = "run", tokenizer: dict[str, Any] | None = None, **prep: Any
    ) -> RunConfig:
        given = [paths] if isinstance(paths, Path) else paths
        sources = prep.pop("sources", [{"paths": [str(p) for p in given]}])
        return RunConfig.model_validate(
            {
                "name": "t",
                "workdir": str(tmp_path / workdir),
                "vocab_size": prep.pop("vocab_size", 400),
                "tokenizer": {"path": str(tokenizer_path), **(tokenizer or {})},
                "prep": {"sources": sources, "sequence_length": 64, **prep},
            }
        )

    return build


def stored_documents(split_dir: Path) -> list[list[int]]:
    """The documents of a split as ids, without BOS and padding: each begins at a BOS."""
    manifest = Manifest.read(split_dir)
    documents: list[list[int]] = []
    dataset = ShardDataset(split_dir, manifest.sequence_length)
    for i in range(len(dataset)):
        if manifest.packing == "best-fit":
            documents.append([])  # a sequence begins with a document or with the rest of a long one
        for token in dataset[i].tolist():
            if token == manifest.bos_id:
                documents.append([])
            elif token not in (manifest.pad_id, manifest.eos_id):
                documents[-1].append(token)
    return documents


def count_text(split_dir: Path) -> tuple[int, ...]:
    """Token counts of a split that do not depend on where its inputs were cut into segments."""
    t = Manifest.read(split_dir).tokens
    return t.text, t.bos, t.eos, t.padding, t.stored + t.tail - t.boundaries


def data_bytes(data_dir: Path) -> dict[str, bytes]:
    """Every file a prep wrote but its log and lock."""
    left_out = {"prep.log.jsonl", ".prep.lock"}
    return {
        str(p.relative_to(data_dir)): p.read_bytes()
        for p in sorted(data_dir.rglob("*"))
        if p.is_file() and p.name not in left_out
    }


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The helpers of this folder's tests."""
    return SimpleNamespace(
        make_texts=make_texts,
        write_lines=write_lines,
        stored_documents=stored_documents,
        count_text=count_text,
        data_bytes=data_bytes,
    )
