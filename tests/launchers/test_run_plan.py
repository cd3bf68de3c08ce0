"""What `submit` says of the whole run before anything is queued, and the disk that is too small."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from calm_scale.accounting import layout_search
from calm_scale.accounting.hardware import device
from calm_scale.cli.app import app
from calm_scale.config import ConfigError, RunConfig, load, load_as
from calm_scale.config.cluster import ClusterConfig
from calm_scale.stages.plan.disk_needs import disk_needs, lack_of_space
from calm_scale.stages.plan.run_plan import look_at_text, run_plan
from data_prep.prep.prep_plan import estimate
from data_prep.tokenizer.definition import train_bpe
from launchers.slurm.layout import shape_of

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def document(tmp_path: Path) -> Path:
    """A run over 100 documents of 80 bytes, its profile beside it."""
    lines = [json.dumps({"text": f"{number:04d} " + "word " * 15}) for number in range(100)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines) + "\n")
    training = {
        "steps": 10,
        "global_batch": 4,
        "precision": "fp32",
        "checkpoint": {"interval": 5, "keep_last": 2},
    }
    values = {
        "name": "planned",
        "workdir": str(tmp_path / "run"),
        "vocab_size": 300,
        "patch_size": 2,
        "prep": {
            "sources": [{"paths": [str(tmp_path / "text.jsonl")]}],
            "splits": {"heldout": 0.1, "autoencoder": 0.2},
            "sequence_length": 32,
        },
        "autoencoder": {"split": "autoencoder", "patches": 16, "training": training, "zero": {"data": 2}},
        "lm": {
            "backbone": {"num_layers": 2, "hidden_size": 16, "ffn_size": 32, "num_heads": 2, "positions": 16},
            "head": {"kind": "energy"},
            "training": training,
            "parallel": {"tensor": 2, "data": 1},
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "cluster.yaml").write_text("name: tiny\ncpus_per_node: 4\ngpu_type: h100\n")
    return tmp_path / "run.yaml"


def rows(config: RunConfig, cluster: ClusterConfig) -> dict[str, str]:
    shapes = {stage: shape_of(config, cluster, stage) for stage in config.stages}
    text = look_at_text(config)
    chip = device("h100")
    table = run_plan(config, shapes, text, disk_needs(config, config.stages, text.estimate), chip)
    names, values = (list(column.cells) for column in table.columns)
    return dict(zip(map(str, names), map(str, values), strict=True))


def test_text_tokens_hours_and_disk_are_in_one_table(document: Path) -> None:
    config = load(document)
    found = rows(config, load_as(ClusterConfig, document.with_name("cluster.yaml")))
    assert "1 inputs" in found["text"]
    size = sum(len(json.loads(line)["text"]) for line in document.with_name("text.jsonl").open())
    documents = int(found["text"].split("about ")[1].split(" ")[0])
    assert documents == pytest.approx(100, rel=0.3), "from their mean length; the file holds some JSON too"
    assert "4.00 bytes each (assumed: no tokenizer to ask)" in found["its tokens"]
    assert "on 4 workers" in found["time of prep"]
    tokens = estimate(config).tokens
    assert tokens == pytest.approx(size / 4, rel=0.3)
    assert f"1,280 needed, {tokens * 0.2:,.0f} available" in found["tokens of autoencoder"]
    assert f"1,280 needed, {tokens * 0.7:,.0f} available" in found["tokens of lm"]
    assert "there is no tokenizer at" in found["tokenizer"]
    assert "GPU-hours: autoencoder 0.0 h, lm" in found["training on h100"]
    assert "3 checkpoints of" in found["disk: lm"]
    assert "2 kept + 1 being written" in found["disk: lm"]
    assert "free on" in found["disk in total"]


def test_inputs_that_only_the_nodes_see_are_no_error(document: Path) -> None:
    config = load(document, ["prep.sources=[{paths: [/nowhere/*.jsonl]}]"])
    found = rows(config, load_as(ClusterConfig, document.with_name("cluster.yaml")))
    assert "not seen from here" in found["text"]
    assert "not seen from here: there is no tokenizer at" in found["tokenizer"]
    assert "not known yet" in found["tokens of lm"]


def test_data_that_end_before_the_steps_are_pointed_out(document: Path) -> None:
    config = load(document, ["lm.training.end_of_data=stop", "lm.training.steps=1000"])
    found = rows(config, load_as(ClusterConfig, document.with_name("cluster.yaml")))
    assert "THE DATA ENDS BEFORE THE STEPS" in found["tokens of lm"]


def test_a_disk_too_small_is_refused_and_what_is_there_counts(
    document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(document)
    text = look_at_text(config).estimate
    needs = disk_needs(config, config.stages, text)
    wanted = sum(need.bytes_in_all for need in needs)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 1, wanted - 1))
    assert "are free, this run still writes" in lack_of_space(needs)
    (config.workdir / "lm").mkdir(parents=True)
    (config.workdir / "lm" / "there").write_bytes(b"x" * 1000)
    assert lack_of_space(disk_needs(config, config.stages, text)) == ""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 1, 1000))
    command = ["submit", str(document), "--cluster", str(document.with_name("cluster.yaml"))]
    with pytest.raises(ConfigError, match="Free some space"):
        CliRunner().invoke(app, command, catch_exceptions=False)
    assert not (config.workdir / "slurm").exists(), "refused before a script is written or a job queued"
    dry = CliRunner().invoke(app, [*command, "--dry-run"], catch_exceptions=False)
    assert dry.exit_code == 2
    assert "dry run: nothing was queued" in dry.output
    *_, space, tokenizer = dry.output.splitlines()
    assert space.startswith("would be refused: ")
    assert "Free some space" in space
    assert tokenizer.startswith("would be refused: there is no tokenizer at")


def test_a_tokenizer_that_only_the_nodes_see_is_no_refusal(document: Path) -> None:
    command = ["submit", str(document), "--cluster", str(document.with_name("cluster.yaml")), "--dry-run"]
    assert CliRunner().invoke(app, command).exit_code == 2, "the text is here, its tokenizer is not"
    unseen = [*command, "--set", "prep.sources=[{paths: [/nowhere/*.jsonl]}]"]
    assert CliRunner().invoke(app, unseen, catch_exceptions=False).exit_code == 0


def test_needs_of_a_sweep_are_summed(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(document, ["lm.training.checkpoint.keep_last=1"])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 1, 0))
    problem = lack_of_space([need for _ in range(4) for need in disk_needs(config, ["lm"], None)])
    assert problem.count("checkpoints of") == 1
    assert "(4 runs × 2 checkpoints of" in problem
    assert "1 kept + 1 being written)" in problem


def test_submit_takes_the_layout_of_the_plan_and_its_hours(tmp_path: Path) -> None:
    """The advice of `plan`, submitted with the house's example profile, on a terminal of 80 columns."""
    house = Path(__file__).parents[2] / "configs"
    run, profile = house / "runs" / "calm-xl.yaml", house / "clusters" / "example.yaml"
    best = layout_search.rank(load(run), 8, device("h100"))[0]
    options = [part for item in (*best.overrides, f"workdir={tmp_path}/run") for part in ("--set", item)]
    command = ["submit", str(run), "--cluster", str(profile), "--dry-run", *options]
    said = CliRunner().invoke(app, command, env={"COLUMNS": "80"}, catch_exceptions=False).output
    assert "stages.lm.nodes: 16 of the profile is not followed" in said
    assert "│ lm          │ 8     │ 8      │ 8 " in said
    assert f"│ {24 * best.days:,.1f} h, " in said
    assert f"MFU {100 * best.mfu:.0f} %" in said
    assert "…" not in said
    assert "a faster layout" not in said


def test_submit_says_how_much_slower_a_layout_is_than_the_plans(tmp_path: Path) -> None:
    house = Path(__file__).parents[2] / "configs"
    run, profile = house / "runs" / "calm-xl.yaml", house / "clusters" / "example.yaml"
    slow = ["lm.parallel.tensor=4", "lm.parallel.pipeline=2", "lm.parallel.data=8", f"workdir={tmp_path}/run"]
    options = [part for item in slow for part in ("--set", item)]
    command = ["submit", str(run), "--cluster", str(profile), "--dry-run", *options]
    said = CliRunner().invoke(app, command, env={"COLUMNS": "600"}, catch_exceptions=False).output
    row = next(line for line in said.splitlines() if "a faster layout" in line)
    best = layout_search.rank(load(run, slow), 8, device("h100"))[0]
    assert f"`plan` would take tp1 pp1 dp64: {1e3 * best.time.total:.0f} ms a step" in row
    assert "% more); select it with --set lm.parallel.tensor=1" in row


def test_a_profile_that_names_no_gpu_is_told_the_key(document: Path) -> None:
    profile = document.with_name("unnamed.yaml")
    profile.write_text("name: unnamed\ncpus_per_node: 8\ngpus_per_node: 2\n")
    command = ["submit", str(document), "--cluster", str(profile), "--dry-run"]
    said = CliRunner().invoke(app, command, env={"COLUMNS": "300"}, catch_exceptions=False).output
    assert "hours not known: the GPU is not named; set `device: …`" in said
    profile.write_text(profile.read_text() + "device: h999\n")
    with pytest.raises(ConfigError, match="unnamed: device: gpu 'h999'"):
        CliRunner().invoke(app, command, catch_exceptions=False)


def test_a_tokenizer_is_asked_where_there_is_one(document: Path) -> None:
    from tokenizers import Tokenizer

    path, text = document.with_name("tokenizer.json"), document.with_name("text.jsonl")
    train_bpe([text], 300, path)
    found = estimate(load(document, [f"tokenizer.path={path}"]))
    texts = [json.loads(line)["text"] for line in text.open()]
    tokens = sum(1 + len(Tokenizer.from_file(str(path)).encode(one).ids) for one in texts)  # one: BOS
    assert found.sampled
    assert found.bytes_per_token == pytest.approx(text.stat().st_size / tokens)
    assert found.tokens == pytest.approx(tokens)
