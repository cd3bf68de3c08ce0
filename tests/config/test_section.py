"""A value means what is written: numbers, truth values, lists and paths, from YAML and `--set`, in every section."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from typer.testing import CliRunner

from calm_scale.cli.app import app
from calm_scale.cli.options import user_path
from calm_scale.config import ConfigError, load, load_as, to_yaml
from calm_scale.config.cluster import ClusterConfig

BASE = """\
vocab_size: 512
patch_size: 2
prep: {sources: [{paths: [a]}, {paths: b.jsonl, weight: 2}], sequence_length: 64}
lm:
  backbone: {num_layers: 4, hidden_size: 64, ffn_size: 128, num_heads: 4, positions: 16}
  training: {steps: 10, global_batch: 4, optimizer: {schedule: {warmup_steps: 1}}}
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(BASE)
    return path


def written(folder: Path, key: str, value: str) -> Path:
    """A document that lays one key over the base, as YAML would be typed."""
    nested = value
    for part in reversed(key.split(".")):
        nested = f"{{{part}: {nested}}}"
    path = folder / "over.yaml"
    path.write_text(f"extends: run.yaml\n{nested[1:-1]}\n")
    return path


def found(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[int(part)] if part.isdigit() else getattr(config, part)
    return config


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("lm.training.steps", "1e3", 1000),
        ("lm.training.steps", "1_000", 1000),
        ("lm.training.checkpoint.interval", "1e3", 1000),
        ("lm.training.checkpoint.interval", "auto", "auto"),
        ("lm.training.eval_interval", "10.0", 10),
        ("lm.training.optimizer.lr", "3e-4", 3e-4),
        ("lm.training.optimizer.clip_norm", "1", 1.0),
        ("generation.temperature", "1/3", 1 / 3),
        ("lm.training.optimizer.schedule.min_lr_ratio", "1/10", 0.1),
        ("logging.progress", "off", False),
        ("logging.progress", "true", True),
        ("logging.wandb_project", "yes", "yes"),
        ("logging.wandb_project", "010", "010"),
        ("generation.stop", "end", ("end",)),
        ("generation.stop", "1:30", ("1:30",)),
        ("prep.keep_tail", "train", ("train",)),
        ("lm.parallel.pipeline_layout", "auto", "auto"),
    ],
)
def test_a_value_is_read_as_written_in_a_file_and_in_an_option(
    tmp_path: Path, run: Path, key: str, value: str, meant: object
) -> None:
    for config in (load(written(tmp_path, key, value)), load(run, [f"{key}={value}"])):
        assert (found(config, key), type(found(config, key))) == (meant, type(meant))
        (tmp_path / "again.yaml").write_text(to_yaml(config))
        assert load(tmp_path / "again.yaml") == config


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("lm.training.steps", "010", "leading zeros"),
        ("lm.training.steps", "1:30", "colons"),
        ("lm.training.steps", "0x10", "decimal digits"),
        ("lm.training.steps", "'10'", "without quotes"),
        ("lm.training.steps", "1.5", "valid integer"),
        ("lm.training.steps", "2026-01-01", "decimal digits"),
        ("lm.training.steps", "1e300", "64 bits"),
        ("lm.training.checkpoint.interval", "1:30", "steps between saves"),
        ("lm.training.checkpoint.interval", "true", "truth value `true`"),
        ("lm.training.eval_interval", "on", "decimal digits"),
        ("lm.training.eval_interval", "true", "truth value `true`"),
        ("lm.training.optimizer.lr", "true", "truth value `true`"),
        ("lm.training.optimizer.lr", "1/0", "fraction"),
        ("seed", "yes", "decimal digits"),
        ("seed", "false", "truth value `false`"),
        ("prep.sources.1.weight", "true", "truth value `true`"),
        ("lm.parallel.pipeline_layout", "[2, true]", "truth value `true`"),
        ("autoencoder", "{training: {steps: 1, global_batch: 1}, zero: {stage: true}}", "truth value"),
        ("logging.wandb_project", "12", "quote it"),
        ("lm", "&a {backbone: *a}", "has no end"),
    ],
)
def test_what_is_no_number_is_refused_where_it_stands(
    tmp_path: Path, run: Path, key: str, value: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(run, [f"{key}={value}"])
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"--set {key}={value}:"), caught.value
    if not key.startswith("prep.sources"):
        with pytest.raises(ConfigError) as caught:
            load(written(tmp_path, key, value))
        assert words in str(caught.value)
        assert "over.yaml:2: " in str(caught.value)


def test_an_alias_to_itself_and_aliases_of_aliases_are_one_line(tmp_path: Path, run: Path) -> None:
    bomb = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
    for text, words in (("lm: &a\n  x: *a\n", "run.yaml:1: `lm.x`: an alias"), (bomb, "aliases of aliases")):
        run.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load(run)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_profile_reads_numbers_by_the_same_rule(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    for value, words in (("010", "leading zeros"), ("yes", "decimal digits"), ("true", "truth value")):
        path.write_text(f"cpus_per_node: {value}\n")
        with pytest.raises(ConfigError, match=f"c.yaml:1: `cpus_per_node`: .*{words}"):
            load_as(ClusterConfig, path)
    path.write_text("cpus_per_node: 1e1\nrequeue: {notice_seconds: 60.0}\nmodules: cuda\n")
    cluster = load_as(ClusterConfig, path)
    assert (cluster.cpus_per_node, cluster.requeue.notice_seconds, cluster.modules) == (10, 60, ("cuda",))


def test_items_of_lists_are_set_by_their_number(run: Path) -> None:
    config = load(run, ["prep.sources.1.text_field=content", "prep.sources.0.paths.0=c"])
    assert config.prep is not None
    first, second = config.prep.sources
    assert (first.paths, second.paths) == (("c",), ("b.jsonl",))
    assert (first.text_field, second.text_field, second.weight) == ("text", "content", 2.0)
    with pytest.raises(
        ConfigError, match=r"--set prep.sources.2.weight=1: item 2 does not exist, the list has 2"
    ):
        load(run, ["prep.sources.2.weight=1"])
    with pytest.raises(
        ConfigError, match=r"--set prep.sources.1.textfield=x: `prep.sources.1.textfield`: unknown"
    ):
        load(run, ["prep.sources.1.textfield=x"])


def test_home_is_expanded_wherever_a_path_is_written(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = str(tmp_path / "home")
    monkeypatch.setenv("HOME", home)
    keys = (
        "workdir",
        "data",
        "tokenizer.path",
        "lm.autoencoder",
        "reading.stage_to",
        "prep.sources.0.paths",
        "prep.sources.0.paths.0",
    )
    for key in keys:
        value = found(load(run, [f"{key}=~/x"]), key)
        assert str(value[0] if isinstance(value, tuple) else value) == f"{home}/x", key
    assert str(load(run, ["workdir=./~/x"]).workdir) == "~/x"
    with pytest.raises(ConfigError, match="`workdir`: ~nosuchuser names no home directory"):
        load(run, ["workdir=~nosuchuser/x"])
    with pytest.raises(ConfigError, match=r"`data`: \$SCRATCH is a variable, which is not expanded here"):
        load(run, ["data=$SCRATCH/x"])
    with pytest.raises(ConfigError, match=r"paths.0`: \$\{SCRATCH\} is a variable"):
        load(run, ["prep.sources.0.paths=${SCRATCH}/*.jsonl"])
    assert load(run, ["reading.stage_to=$TMPDIR/x"]).reading.stage_to == "$TMPDIR/x", "each node has its own"
    profile = {
        "cpus_per_node": 1,
        "python": "~/python",
        "environment": {"HF_HOME": "~/hf", "OWN": "$HOME"},
        "container": {"runtime": "apptainer", "image": "~/i.sif", "mounts": "~/m:/m"},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(profile))
    cluster = load_as(ClusterConfig, tmp_path / "c.yaml")
    assert cluster.container is not None
    assert cluster.environment == {"HF_HOME": f"{home}/hf", "OWN": "$HOME"}
    written_out = (cluster.python, cluster.container.image, cluster.container.mounts[0])
    assert written_out == (f"{home}/python", f"{home}/i.sif", f"{home}/m:/m")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/base.yaml").write_text("seed: 7\n")
    run.write_text(f"extends: ~/base.yaml\n{BASE}")
    assert load(run).seed == 7


def test_every_option_that_names_a_file_reads_home_like_the_configuration(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    done = CliRunner().invoke(app, ["config", "validate", "~/run.yaml"])
    assert done.exit_code == 0, done.output
    assert f"{tmp_path}/run.yaml" in done.output.replace("\n", "")

    groups = [app, *(group.typer_instance for group in app.registered_groups)]
    callbacks = [command.callback for group in groups if group for command in group.registered_commands]
    options = [
        option for one in callbacks if one for option in get_type_hints(one, include_extras=True).values()
    ]
    of_paths = [option for option in options if "Path" in str(get_args(option)[:1])]
    assert len(of_paths) > 30
    assert {option.__metadata__[0].parser for option in of_paths} == {user_path}
