"""A whole run small enough for a test: real text, every stage by its command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from forked_command import run_forked

DOCUMENT = {
    "name": "tiny",
    "vocab_size": 512,
    "patch_size": 2,
    "prep": {"splits": {"heldout": 0.1}, "sequence_length": 64, "alignment": 8},
    "autoencoder": {
        "patches": 32,
        "model": {"latent_size": 8, "hidden_size": 32, "ffn_size": 64},
        "training": {
            "steps": 4,
            "global_batch": 8,
            "micro_batch": 4,
            "precision": "fp32",
            "optimizer": {"lr": 2e-3, "schedule": {"warmup_steps": 2}},
            "eval_interval": 2,
            "eval_samples": 8,
            "checkpoint": {"interval": 2},
        },
        "zero": {"stage": 2, "data": 2},
    },
    "lm": {
        "backbone": {"num_layers": 2, "hidden_size": 32, "ffn_size": 64, "num_heads": 2, "positions": 32},
        "head": {"kind": "energy", "num_samples": 4, "num_posterior": 8},
        "training": {
            "steps": 6,
            "global_batch": 8,
            "micro_batch": 4,
            "precision": "fp32",
            "optimizer": {"lr": 2e-3, "schedule": {"warmup_steps": 2}},
            "eval_interval": 3,
            "eval_samples": 8,
            "checkpoint": {"interval": 2},
        },
    },
    "evaluation": {"max_sequences": 4, "num_samples": 2, "bootstrap": 100},
    "generation": {"num_candidates": 4, "max_new_tokens": 8},
    "logging": {"wandb": "disabled"},
}


@dataclass
class Finished:
    """A command that ended."""

    code: int
    out: str
    err: str


@dataclass
class TinyRun:
    """The document of a run, its folder, and its commands."""

    document: Path
    folder: Path
    results: dict[str, Finished] = field(default_factory=dict)

    def __call__(self, *arguments: str, expect: int = 0) -> Finished:
        done = self.attempt(*arguments)
        assert done.code == expect, f"{arguments} ended with {done.code}\n{done.out}\n{done.err}"
        return done

    def attempt(self, *arguments: str) -> Finished:
        """Run a command of one process, however it ends."""
        return Finished(*run_forked(arguments, timeout=240))

    def start(self, *arguments: str, expect: int = 0) -> Finished:
        """Run a command as a shell does, to its end; it may start more processes."""
        done = subprocess.run(
            [sys.executable, "-m", "calm_scale", *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        assert done.returncode == expect, (
            f"{arguments} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return Finished(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def write_document(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyRun]:
    """Write corpus, tokenizer and document of a tiny run under a name."""
    from calm_scale.stages.demo.corpus import write_demo_corpus
    from data_prep.tokenizer.definition import train_bpe

    shared = tmp_path_factory.mktemp("corpus")
    files = write_demo_corpus(shared, num_files=2, target_bytes=300_000, documentation_only=True)
    tokenizer = train_bpe(files, 512, shared / "tokenizer.json")

    def write(name: str) -> TinyRun:
        folder = tmp_path_factory.mktemp(name)
        document = {
            **DOCUMENT,
            "workdir": str(folder / "run"),
            "tokenizer": {"path": str(tokenizer)},
            "prep": {**DOCUMENT["prep"], "sources": [{"paths": [str(shared / "*.jsonl.zst")]}]},
        }
        path = folder / "tiny.yaml"
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        return TinyRun(path, folder / "run")

    return write


@pytest.fixture(scope="session")
def trained(write_document: Callable[[str], TinyRun]) -> TinyRun:
    """A run after prep, both trainings (the LM in two layouts) — shared by the tests, which only read it."""
    run = write_document("trained")
    name = str(run.document)
    run.results["prep"] = run.start("prep", name)
    run.results["ae"] = run.start("train-ae", name)
    run.results["lm"] = run.start(
        "train-lm", name, "--set", "lm.training.steps=4", "--set", "lm.parallel.tensor=2"
    )
    run.results["resumed"] = run.start("train-lm", name, "--set", "lm.parallel.pipeline=2")
    return run
