"""A configuration is loaded strictly, and every mistake says where it stands and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from calm_scale.config import ConfigError, RunConfig, config_hash, load, to_yaml

REPO = Path(__file__).resolve().parents[2]
MINIMAL = """\
vocab_size: 512
patch_size: 2
lm:
  backbone: {num_layers: 4, hidden_size: 64, ffn_size: 128, num_heads: 4, positions: 16}
  training: {steps: 10, global_batch: 4}
"""


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def failure(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    "preset", sorted(REPO.glob("configs/**/*.yaml")), ids=lambda p: f"{p.parent.name}/{p.stem}"
)
def test_every_preset_loads(preset: Path) -> None:
    if preset.parent.name == "clusters":
        from calm_scale.config.cluster import ClusterConfig
        from calm_scale.config.loading import load_as

        assert load_as(ClusterConfig, preset).name == preset.stem
    else:
        assert load(preset).name


def test_name_defaults_to_the_file_and_fills_the_workdir(tmp_path: Path) -> None:
    config = load(write(tmp_path, MINIMAL, "my-run.yaml"))
    assert (config.name, config.workdir) == ("my-run", Path("runs/my-run"))


def test_resolved_document_loads_to_an_equal_one(tmp_path: Path) -> None:
    config = load(REPO / "configs/runs/calm-xl.yaml")
    again = load(write(tmp_path, to_yaml(config)))
    assert again == config
    assert config_hash(again) == config_hash(config)


@pytest.mark.parametrize("text", ["3e-4", "3E-4", "0.3e-3", "+3e-4", "0.0003", "3.e-4"])
def test_scientific_notation_is_a_number(tmp_path: Path, text: str) -> None:
    path = write(
        tmp_path,
        MINIMAL + f"  # end\nautoencoder:\n  training:\n    steps: 1\n    global_batch: 1\n"
        f"    optimizer: {{lr: {text}}}\n",
    )
    assert load(path).autoencoder.training.optimizer.lr == pytest.approx(3e-4, rel=1e-12)


@pytest.mark.parametrize("word", ["1e", "e4", "12ab", "1_000x"])
def test_words_stay_words(tmp_path: Path, word: str) -> None:
    assert load(write(tmp_path, MINIMAL + f"name: {word}\n")).name == word


def test_unknown_key_names_place_and_nearest(tmp_path: Path) -> None:
    message = failure(write(tmp_path, MINIMAL.replace("num_heads", "num_head")))
    assert "run.yaml:4: `lm.backbone.num_head`: unknown key; did you mean `num_heads`?" in message


def test_unknown_key_inside_a_head_is_written_as_the_user_wrote_it(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "  head:\n    kind: flow\n    num_repeat: 3\n")
    assert "run.yaml:8: `lm.head.num_repeat`: unknown key; did you mean `num_repeats`?" in failure(path)


def test_duplicate_key_is_an_error_with_both_places(tmp_path: Path) -> None:
    message = failure(write(tmp_path, MINIMAL + "vocab_size: 600\n"))
    assert "run.yaml:6: duplicate key `vocab_size` (first at" in message
    assert "run.yaml:1)" in message


def test_every_mistake_is_reported_at_once(tmp_path: Path) -> None:
    text = MINIMAL.replace("steps: 10", "steps: 0").replace("512", "one")
    message = failure(write(tmp_path, text))
    assert "`lm.training.steps`" in message
    assert "`vocab_size`" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n", "mapping"),
        ("a: [1\n", "not valid YAML"),
        ("a: !!python/object:os.system x\n", "not valid YAML"),
    ],
)
def test_broken_yaml_is_one_message(tmp_path: Path, text: str, words: str) -> None:
    assert words in failure(write(tmp_path, text))


def test_missing_file_is_one_message(tmp_path: Path) -> None:
    assert "No such file" in failure(tmp_path / "nowhere.yaml")


def test_extends_merges_in_order_and_the_file_wins(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL, "base/a.yaml")
    write(tmp_path, "seed: 7\nlm:\n  training: {steps: 20}\n", "base/b.yaml")
    path = write(tmp_path, "extends: [base/a.yaml, base/b.yaml]\nlm: {training: {global_batch: 8}}\n")
    config = load(path)
    assert (config.seed, config.lm.training.steps, config.lm.training.global_batch) == (7, 20, 8)
    assert config.name == "run"


def test_error_in_an_extended_file_names_that_file(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL.replace("512", "0"), "base.yaml")
    assert "base.yaml:1: `vocab_size`" in failure(write(tmp_path, "extends: base.yaml\n"))


def test_extends_in_a_circle_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, "extends: b.yaml\n", "a.yaml")
    write(tmp_path, "extends: a.yaml\n", "b.yaml")
    assert "circle" in failure(tmp_path / "a.yaml")


def test_another_head_kind_replaces_the_section(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL + "  head: {kind: energy, num_samples: 4}\n", "base.yaml")
    path = write(tmp_path, "extends: base.yaml\nlm: {head: {kind: flow}}\n")
    assert load(path).lm.head.kind == "flow"


def test_overrides_win_and_are_named_in_errors(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    assert load(path, ["lm.training.optimizer.lr=1e-3"]).lm.training.optimizer.lr == 1e-3
    assert load(path, ["prep={sources: [{paths: [a]}], sequence_length: 64}"]).prep.sequence_length == 64
    assert "--set lm.training.steps=zero: `lm.training.steps`" in failure(path, "lm.training.steps=zero")
    assert failure(path, "lm.trainig.steps=1").startswith(
        "--set lm.trainig.steps=1: `lm.trainig`: unknown key"
    )
    assert "with --set lm.parallel.tensor=3: `lm`" in failure(path, "lm.parallel.tensor=3")
    assert "key.path=value" in failure(path, "steps")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("lm.parallel.tensor=3", "num_heads 4 is not divisible by tensor parallel size 3"),
        ("lm.backbone.num_heads=3", "not a multiple of num_heads 3"),
        ("lm.parallel={pipeline: 8}", "8 pipeline stages need at least 8 layers"),
        ("lm.parallel={pipeline: 2, pipeline_layout: [1, 2]}", "sums to 3"),
        ("lm.parallel={pipeline: 2, pipeline_layout: [4]}", "lists 1 stages"),
        ("lm.parallel={pipeline: 3, pipeline_layout: even}", "pipeline_layout: auto"),
        ("lm.parallel={sequence_parallel: true}", "needs tensor > 1"),
        ("lm.parallel={virtual_pipeline: 2}", "needs pipeline > 1"),
        ("lm.parallel={data: 3}", "nearest that fit are 3 and 6"),
        ("lm.training={micro_batch: 3}", "not a multiple of micro_batch 3"),
        ("lm.head={kind: softmax}", "patch_size must be 1"),
        ("lm.head={kind: energy, num_samples: 1}", "greater than or equal to 2"),
        ("lm.head={kind: energy, alpha: 2.1}", "less than or equal to 2"),
        ("lm.head={kind: energy, alpha: 0}", "greater than 0"),
        (
            "prep={sources: [{paths: [a]}], alignment: 3, sequence_length: 96}",
            "not a multiple of patch_size 2",
        ),
        ("prep={sources: [{paths: [a]}], sequence_length: 48}", "positions × patch_size = 32"),
        ("prep={sources: []}", "at least 1 item"),
        (
            "autoencoder={training: {steps: 1, global_batch: 1}, model: {encoder_layers: 3}}",
            "encoder_layers 3 is odd",
        ),
        ("name=../escape", "should match pattern"),
        ("seed=.nan", "`seed`"),
        ("lm.backbone.num_layers=1000000000", "less than or equal to 10000"),
        ("seed=9223372036854775808", "less than 9223372036854775808"),
        ("evaluation.seed=-1", "greater than or equal to 0"),
        ("generation.seed=99999999999999999999", "less than 9223372036854775808"),
    ],
)
def test_cross_checks(tmp_path: Path, override: str, words: str) -> None:
    assert words in failure(write(tmp_path, MINIMAL), override)


def test_models_are_frozen(tmp_path: Path) -> None:
    config: RunConfig = load(write(tmp_path, MINIMAL))
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3


def test_yaml_output_needs_no_python_tags() -> None:
    assert yaml.safe_load(to_yaml(load(REPO / "configs/lm/transformer-s.yaml")))["lm"]["head"] == {
        "kind": "softmax"
    }
