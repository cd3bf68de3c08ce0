"""Every field is documented and says what a change of it does; the documentation on paper is that of the code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from typer.testing import CliRunner

from calm_scale.cli.app import app
from calm_scale.config import ConfigError, RunConfig, Section
from calm_scale.config.cluster import ClusterConfig
from calm_scale.config.fields import documented, explain, fields_of, markdown, policy_of
from calm_scale.config.lm import HeadConfig
from calm_scale.config.section import RESULTS, SAFE, Policy

DOCS = Path(__file__).resolve().parents[2] / "docs/configuration.md"


def without_policy(model: type[Section]) -> list[str]:
    """A field that is a section says nothing of its own, unless it may be absent."""
    return [
        field.path
        for field in fields_of(model)
        if field.policy.resume is None and (not field.sections or "null" in field.value)
    ]


def without_documentation(model: type[Section]) -> list[str]:
    return [field.path for field in fields_of(model) if not field.text]


def test_every_field_says_what_a_change_does_and_what_it_means() -> None:
    assert without_policy(RunConfig) == []
    assert without_documentation(RunConfig) == []
    assert without_documentation(ClusterConfig) == []


class _Inner(Section):
    forgotten: int = 0
    chosen: Annotated[int, RESULTS] = 0
    """Documented."""


class _Outer(Section):
    inner: _Inner = _Inner()
    """Documented."""
    absent: _Inner | None = None
    """Documented."""


def test_a_field_without_policy_or_documentation_is_found() -> None:
    assert without_policy(_Outer) == ["inner.forgotten", "absent", "absent.forgotten"]
    assert without_documentation(_Outer) == ["inner.forgotten", "absent.forgotten"]


def test_a_field_has_its_own_policy_that_of_its_section_and_the_stages_around_it() -> None:
    assert policy_of("lm.training.optimizer.lr").resume == "results"
    assert policy_of("lm.training.checkpoint.keep_last").resume == "safe"
    assert policy_of("lm.training.optimizer.lr").sweep == "lm"
    assert policy_of("autoencoder.training.optimizer.lr").sweep == "autoencoder"
    assert policy_of("logging.interval").sweep is None
    assert policy_of("autoencoder.zero.overrides.wall_clock_breakdown").resume == "results"


def test_a_field_of_another_version_is_judged_as_its_section_is() -> None:
    assert policy_of("lm.training.fame").resume == "results"
    assert policy_of("lm.backbone.fame").resume == "forbidden"
    assert policy_of("fame") == Policy("results")


def test_a_field_of_a_head_belongs_to_the_model_unless_it_says_otherwise() -> None:
    class Head(HeadConfig):
        kind: Literal["mmd"] = "mmd"
        width: int = 3
        batch: Annotated[int, SAFE] = 1

    policies = {field.name: field.policy for field in fields_of(Head)}
    assert policies["width"] == Policy("forbidden", model=True)
    assert policies["batch"] == SAFE


def test_the_fields_in_the_documentation_are_those_of_the_code() -> None:
    written = DOCS.read_text(encoding="utf-8").partition("<!-- Below: `make docs`. -->\n")[2]
    assert written == markdown(), "docs/configuration.md is stale: run `make docs`"


def test_a_section_a_field_and_an_item_of_a_list_are_explained() -> None:
    assert [field.path for field in documented("lm.training.optimizer.schedule.kind")] == [
        "lm.training.optimizer.schedule.kind"
    ]
    text = explain("lm.training.checkpoint.node_mtbf_hours")
    assert "number > 0 (default 6334.0)" in text and "hours" in text and "safe to change" in text
    assert "lm.training.steps: integer > 0 (required)" in explain("lm.training")
    assert "autoencoder." not in explain("lm.training")
    assert "In a sweep: the runs differ from stage prep on." in explain("prep.sources.0.paths")
    assert "When a run resumes" not in explain("cluster.partition")


def test_an_unknown_path_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"lm\.trainig: no such field or section; the nearest is `lm\.training`"
    ):
        explain("lm.trainig")


def test_the_command_explains() -> None:
    result = CliRunner().invoke(app, ["config", "explain", "logging"])
    assert result.exit_code == 0
    assert result.output.startswith("logging.interval: integer > 0 (default 10)\n")
