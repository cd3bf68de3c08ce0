"""From text to scores by the commands a user types, on two ranks; and what a user may get wrong on the way."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calm_scale.record import ledger
from calm_scale.record.metrics import read_metrics
from data_prep.shards.manifest import Manifest

pytestmark = pytest.mark.ranks
TinyRun = Any  # the class stands in this folder's conftest


def test_prepared_splits_account_for_every_token(trained: TinyRun) -> None:
    for split in ("train", "heldout"):
        manifest = Manifest.read(trained.folder / "data" / split)
        assert manifest.tokens.closes()
        assert manifest.num_sequences > 0


def test_autoencoder_is_exported_with_the_data_it_saw(trained: TinyRun) -> None:
    card = json.loads((trained.folder / "autoencoder" / "export" / "card.json").read_text())
    manifest = Manifest.read(trained.folder / "data" / "train")
    assert (card["patch_size"], card["latent_size"], card["steps"]) == (2, 8, 4)
    assert card["tokenizer_fingerprint"] == manifest.tokenizer_fingerprint
    assert card["data_fingerprint"] == manifest.fingerprint


def test_the_lm_went_on_in_another_layout_with_one_record(trained: TinyRun) -> None:
    assert "resumed at step 4" in trained.results["resumed"].err
    assert "lm.parallel.pipeline: 1 → 2" in trained.results["resumed"].err
    rows = read_metrics(trained.folder / "lm" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["attempt"] for row in rows] == [0, 0, 0, 0, 1, 1]
    stops = [
        event
        for event in ledger.history(trained.folder / "lm" / "ledger.jsonl").events
        if event.kind == "stop"
    ]
    assert [(stop.attempt, stop.cause, stop.steps_done) for stop in stops] == [
        (0, "finished", 4),
        (1, "finished", 2),
    ]


def test_evaluation_names_its_protocol_and_does_not_depend_on_ranks(trained: TinyRun, tmp_path: Path) -> None:
    alone, pair = tmp_path / "alone.json", tmp_path / "pair.json"
    trained("eval", str(trained.document), "--json", str(alone))

    from launchers.local import launch

    command = [sys.executable, "-m", "calm_scale", "eval", str(trained.document), "--json", str(pair)]
    assert launch(command, 2, log_dir=tmp_path / "logs") == 0
    first, second = (json.loads(path.read_text()) for path in (alone, pair))
    assert first["score"] == second["score"]
    assert first["protocol"] == second["protocol"]
    assert first["protocol"]["provenance"]["step"] == "6"
    assert first["score"]["brierlm"] is None
    protocol = first["protocol"]
    assert (protocol["patch_size"], protocol["block_tokens"], protocol["num_samples"]) == (2, 64, 2)
    assert (protocol["temperature"], protocol["seed"], protocol["scored_offsets"]) == (1.0, 0, [0])
    assert protocol["num_documents"] == first["score"]["num_documents"] > 0
    assert {"dropped_tail_tokens", "sequences_left_out", "partial_sequences"} <= protocol.keys()
    card = json.loads((trained.folder / "autoencoder" / "export" / "card.json").read_text())
    assert protocol["provenance"]["autoencoder"] == card["fingerprint"]
    assert (first["execution"]["ranks"], second["execution"]["ranks"]) == (1, 2)


def test_every_offset_two_results_compared_and_texts_ranked(trained: TinyRun, tmp_path: Path) -> None:
    results = [tmp_path / name for name in ("first.json", "all.json")]
    for result in results:
        trained("eval", str(trained.document), "--json", str(result), "--coverage", result.stem)
    first, every = (json.loads(path.read_text()) for path in results)
    assert every["protocol"]["scored_offsets"] == [0, 1]
    assert every["score"]["num_positions"][0] > 1.9 * first["score"]["num_positions"][0]
    assert "coverage: a first, b all" in trained("compare", *map(str, results)).out
    scored = trained(
        "score", str(trained.document), "--text", "def main", "--text", "", "--text", "The sea"
    ).out
    rows = [json.loads(line) for line in scored.splitlines()]
    assert [row["kind"] for row in rows] == ["energy", None, "energy"]
    assert "no whole patch of 2 tokens" in rows[1]["reason"]


def test_generation_is_the_same_twice_and_on_two_ranks_and_stays_inside_the_vocabulary(
    trained: TinyRun, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def "}\n\n{"prompt": "The"}\n')
    texts = []
    options_of = ["--jsonl", str(prompts)], ["--prompt", "def ", "--prompt", "The"]
    splits = ["--tensor-parallel", "2"], ["--set", "evaluation.tensor_parallel=2"]
    for name, split, given in (
        ("a", [], 0),
        ("b", [], 1),
        ("asked", splits[0], 0),
        ("configured", splits[1], 0),
    ):
        options = [*options_of[given], "--out", str(tmp_path / name), *split]
        trained("generate", str(trained.document), *options)
        texts.append((tmp_path / name).read_text())
    assert texts == [texts[0]] * 4
    rows = [json.loads(line) for line in texts[0].splitlines()]
    assert [row["prompt"] for row in rows] == ["def ", "The"]
    assert all(0 <= token < 512 for row in rows for token in row["token_ids"])


def test_checkpoint_commands(trained: TinyRun, tmp_path: Path) -> None:
    assert "sizes" in trained("ckpt", "ls", str(trained.folder)).out
    listed = trained("ckpt", "ls", str(trained.folder), "--verify").out
    assert "complete" in listed and "sizes" not in listed
    newest = trained.folder / "lm" / "checkpoints" / "step_00000006"
    assert "every checksum verified" in " ".join(trained("ckpt", "verify", str(newest)).out.split())
    assert '"steps": 6' in trained("ckpt", "inspect", str(newest)).out
    trained("ckpt", "export", str(newest), "--out", str(tmp_path / "published"))
    trained("ckpt", "import", str(tmp_path / "published"), "--out", str(tmp_path / "imported"))
    imported = str(tmp_path / "imported" / "config.yaml")
    assert "def " in trained("generate", imported, "--prompt", "def ").out
    other = ["--set", "tokenizer.bos_token=<|pad|>"]
    assert "but the model was trained with" in trained("generate", imported, *other, expect=2).err
    again = tmp_path / "imported" / "lm" / "checkpoints" / "step_00000000"
    trained("ckpt", "export", str(again), "--out", str(tmp_path / "again"))
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("published", "again")]
    assert weights[0] == weights[1]
    refused = trained(
        "ckpt", "import", str(tmp_path / "published"), "--out", str(tmp_path / "imported"), expect=2
    )
    assert "is not empty" in refused.err


def test_an_import_of_a_damaged_folder_leaves_nothing(trained: TinyRun, tmp_path: Path) -> None:
    newest = trained.folder / "lm" / "checkpoints" / "step_00000006"
    trained("ckpt", "export", str(newest), "--out", str(tmp_path / "published"))
    config = tmp_path / "published" / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": 32', '"hidden_size": "wide"'))
    refused = trained("ckpt", "import", str(tmp_path / "published"), "--out", str(tmp_path / "run"), expect=2)
    assert "published/config.json is not a language model we can build: hidden_size: " in refused.err
    assert [path.name for path in tmp_path.iterdir()] == ["published"]


def test_an_autoencoder_checkpoint_exports_what_the_stage_exported(trained: TinyRun, tmp_path: Path) -> None:
    last = trained.folder / "autoencoder" / "checkpoints" / "step_00000004"
    trained("ckpt", "export", str(last), "--out", str(tmp_path / "ae"))
    ours = json.loads((tmp_path / "ae" / "card.json").read_text())
    stage = json.loads((trained.folder / "autoencoder" / "export" / "card.json").read_text())
    assert ours["fingerprint"] == stage["fingerprint"]
    refused = trained("ckpt", "export", str(last), "--out", str(tmp_path / "ae"), expect=2)
    assert "is not empty" in refused.err


def test_flops_report_of_the_run_is_one_file(trained: TinyRun, tmp_path: Path) -> None:
    page = tmp_path / "flops.html"
    trained("flops", str(trained.folder), "--html", str(page))
    text = page.read_text()
    assert "planned, done, wasted" in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "MFU unavailable" in text


def test_resume_check_tells_safe_from_forbidden(trained: TinyRun) -> None:
    name, run = str(trained.document), str(trained.folder)
    assert "may resume" in trained("config", "validate", name, "--resume", run).out
    refused = trained(
        "config", "validate", name, "--resume", run, "--set", "lm.training.optimizer.lr=1e-3", expect=2
    )
    assert "cannot resume with these changes" in refused.out
    accepted = ["--set", "lm.training.optimizer.lr=1e-3", "--accept", "lm.training.optimizer.lr"]
    assert "may resume" in trained("config", "validate", name, "--resume", run, *accepted).out
    forbidden = trained(
        "config", "validate", name, "--resume", run, "--set", "lm.backbone.hidden_size=64", expect=2
    )
    assert "forbidden" in forbidden.out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["train-lm", "{doc}", "--set", "vocab_size=300"], 2, "holds token id"),
        (["train-lm", "{doc}", "--set", "patch_size=1"], 2, "does not fit the run"),
        (["train-lm", "{doc}", "--set", "lm.autoencoder=/nowhere"], 2, "holds no exported autoencoder"),
        (["train-lm", "{doc}", "--set", "data=/nowhere"], 2, "run `calm-scale prep` first"),
        (
            ["train-lm", "{doc}", "--set", "lm.training.optimizer.lr=1"],
            2,
            "--accept lm.training.optimizer.lr",
        ),
        (["eval", "{doc}", "--step", "5"], 2, "Complete steps: 2, 4, 6"),
        (
            ["eval", "{doc}", "--set", "lm.backbone.num_heads=1"],
            2,
            "lm.backbone.num_heads: trained with 2, now 1",
        ),
        (
            ["generate", "{doc}", "--set", "lm.backbone.rope_theta=5"],
            2,
            "lm.backbone.rope_theta: trained with",
        ),
        (["score", "{doc}", "--text", "The sea", "--set", "lm.head.num_blocks=2"], 2, "lm.head.num_blocks"),
        (
            ["eval", "{doc}", "--set", "evaluation.split=train", "--set", "workdir=/tmp/nowhere"],
            2,
            "no prepared",
        ),
        (["generate", "{doc}", "--jsonl", "{doc}"], 2, "tiny.yaml:1: expected a JSON object"),
        (["score", "{doc}", "--text", ""], 2, "nothing to score"),
        (["generate", "{doc}", "--tensor-parallel", "3"], 2, "num_heads 2 is not divisible"),
        (["compare", "{doc}", "{doc}"], 2, "is damaged, not JSON"),
        (["ckpt", "verify", "/nowhere"], 2, "is not a checkpoint"),
        (["ckpt", "ls", "/nowhere"], 2, "no checkpoints there"),
        (["flops", "/nowhere"], 2, "cannot read"),
        (
            ["train-lm", "{doc}", "--nproc", "2", "--dry-run", "--set", "lm.parallel.tensor=4"],
            2,
            "not divisible",
        ),
    ],
)
def test_a_users_mistake_is_one_clear_message(
    trained: TinyRun, arguments: list[str], code: int, words: str
) -> None:
    done = trained.attempt(*(a.replace("{doc}", str(trained.document)) for a in arguments))
    assert words in " ".join(done.err.split())
    assert done.code == code
    assert "Traceback" not in done.err


def test_dry_runs_write_nothing(write_document: Callable[[str], TinyRun]) -> None:
    run = write_document("dry")
    for command in ("prep", "train-ae", "train-lm"):
        run(command, str(run.document), "--dry-run")
    assert not run.folder.exists()
