"""The plan: legal layouts, honest limits, quick; what it chooses really constructs, up to 1024 ranks."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from calm_scale.accounting import layout_search, memory
from calm_scale.accounting.compared_models import paper_model
from calm_scale.accounting.hardware import UnknownDeviceError, device
from calm_scale.accounting.placement import stage_parameters
from calm_scale.accounting.report.plan_sections import plan_document, scaling_document
from calm_scale.accounting.report.render import to_json, to_markdown
from calm_scale.config import ConfigError, RunConfig, load, to_yaml
from calm_scale.stages.plan.costs import node_counts

CONFIGS = Path(__file__).parents[2] / "configs"
BUILDER = Path(__file__).with_name("build_fake_ranks.py")


def test_ranked_layouts_are_legal_and_sorted() -> None:
    ranked = layout_search.rank(paper_model("CALM-XL"), 8, device("h100"))
    fitting = [layout.time.total for layout in ranked if layout.fits]
    assert fitting == sorted(fitting)
    assert all(not later.fits for later in ranked[len(fitting) :])
    for layout in ranked:
        parallel = layout.config.lm.parallel  # type: ignore[union-attr]
        assert parallel.tensor * parallel.pipeline * layout.data_parallel == 64
        assert sum(layout.layers) == 16
        # What the plan builds without validation is a configuration that validates.
        RunConfig.model_validate(layout.config.model_dump())


def test_choice_can_be_selected_by_its_overrides() -> None:
    best = layout_search.rank(load(CONFIGS / "lm" / "calm-l.yaml"), 2, device("h200"))[0]
    chosen = load(CONFIGS / "lm" / "calm-l.yaml", best.overrides)
    assert chosen.lm is not None and best.config.lm is not None
    assert chosen.lm.parallel == best.config.lm.parallel
    assert chosen.lm.training.micro_batch == best.config.lm.training.micro_batch


@pytest.mark.parametrize("nodes", [1, 64])
@pytest.mark.parametrize("gpu", ["h100", "a100", "h200", "b200", "mi300x"])
def test_every_gpu_and_size_in_under_five_seconds(gpu: str, nodes: int) -> None:
    config = load(CONFIGS / "lm" / "calm-7b.yaml")
    start = time.process_time()
    ranked = layout_search.rank(config, nodes, device(gpu))
    assert time.process_time() - start < 5
    assert ranked[0].fits
    assert 0 < ranked[0].mfu < 1


def test_more_nodes_take_less_time() -> None:
    days = [layout_search.rank(paper_model("CALM-XL"), nodes, device("h100"))[0].days for nodes in (1, 4, 16)]
    assert days == sorted(days, reverse=True)


def test_what_does_not_fit_is_said_not_to_fit() -> None:
    config = load(CONFIGS / "lm" / "calm-7b.yaml")
    ranked = layout_search.rank(config, 1, device("a100-40gb"), gpus_per_node=1)
    assert not any(layout.fits for layout in ranked)
    assert "NO LAYOUT FITS" in to_markdown(plan_document(config, 1, device("a100-40gb"), gpus_per_node=1))


def test_recompute_only_where_needed() -> None:
    for layout in layout_search.rank(load(CONFIGS / "lm" / "calm-7b.yaml"), 2, device("h100")):
        assert layout.config.lm is not None
        if layout.config.lm.parallel.recompute == "full":
            parallel = layout.config.lm.parallel.model_copy(update={"recompute": "none"})
            lm = layout.config.lm.model_copy(update={"parallel": parallel})
            without = layout.config.model_copy(update={"lm": lm})
            stages = memory.language_model(without, layout.data_parallel)
            assert memory.fullest(stages).total > layout.limit


def test_errors_say_what_to_do() -> None:
    with pytest.raises(UnknownDeviceError, match="mi300x"):
        layout_search.rank(paper_model("CALM-M"), 1, device("v100"))
    with pytest.raises(ConfigError, match="global_batch"):
        layout_search.rank(paper_model("CALM-M"), 7, device("h100"), gpus_per_node=7)


def test_document_has_choice_ranking_and_assumptions() -> None:
    document = plan_document(paper_model("CALM-XL"), 8, device("h100"))
    found = json.loads(to_json(document))["sections"]
    assert set(found) == {"choice", "layouts", "assumptions"}
    assert found["layouts"]["tables"]["layouts"]["rows"][0]["fits"] == "yes"
    whole = found["layouts"]["tables"]["layouts"]
    best = whole["rows"][0]
    assert len(whole["rows"]) > 15 and "of" not in whole["title"]
    sizes = [best[key] for key in ("tensor", "pipeline", "data")]
    assert best["ranks"] == math.prod(sizes) and best["fits_memory"] is True
    assert best["layout"].startswith(f"tp{sizes[0]} pp{sizes[1]}")
    printed = to_markdown(document)
    assert f"(15 of {len(whole['rows'])})" in printed and "Sequence parallel" not in printed


def test_every_stage_s_layers_and_share_stand_beside_its_memory() -> None:
    document = plan_document(
        load(CONFIGS / "lm" / "calm-7b.yaml"), 1, device("a100")
    )  # chooses two pipeline stages
    rows = json.loads(to_json(document))["sections"]["choice"]["tables"]["memory"]["rows"]
    layers = [sum(map(int, row["layers"].split("+"))) for row in rows]
    assert layers[0] > layers[1] > 0 and sum(layers) == 32  # the head stands on the last
    assert sum(row["share"] for row in rows) == pytest.approx(1)


def test_several_numbers_of_nodes_in_under_five_seconds() -> None:
    config = load(CONFIGS / "runs" / "calm-xl.yaml")
    start = time.process_time()
    document = scaling_document(config, node_counts("1..64"), device("h100"))
    assert time.process_time() - start < 5
    rows = json.loads(to_json(document))["sections"]["nodes"]["tables"]["nodes"]["rows"]
    assert [row["nodes"] for row in rows] == [1, 2, 4, 8, 16, 32, 64]
    chosen = [row for row in rows if row["choice"] == "chosen"]
    assert len(chosen) == 1
    cheapest = min(row["dollars"] for row in rows)
    larger = [row["dollars"] for row in rows if row["nodes"] > chosen[0]["nodes"]]
    assert chosen[0]["dollars"] <= 1.25 * cheapest < min(larger)
    best = layout_search.rank(config, chosen[0]["nodes"], device("h100"))[0]
    assert chosen[0]["step"] == best.time.total
    assert "Select it with: " + " ".join(f"--set {x}" for x in best.overrides) in to_markdown(document)


def test_numbers_of_nodes_without_a_layout_are_named_and_passed_over() -> None:
    small = paper_model("CALM-M")
    text = to_markdown(scaling_document(small, [1, 7], device("h100"), gpus_per_node=7))
    assert "7 nodes: no layout fits" in text
    with pytest.raises(ConfigError, match="global_batch"):
        scaling_document(small, [7, 14], device("h100"), gpus_per_node=7)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("8", [8]),
        ("4,1,2", [1, 2, 4]),
        ("1..64", [1, 2, 4, 8, 16, 32, 64]),
        ("3..20", [4, 8, 16]),
        ("5..7", [5, 7]),
    ],
)
def test_numbers_of_nodes(text: str, counts: list[int]) -> None:
    assert node_counts(text) == counts


@pytest.mark.parametrize("text", ["0", "x", "1,,2", "8..2", "1..1000000", ""])
def test_other_numbers_of_nodes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--nodes"):
        node_counts(text)


def narrow(layout: layout_search.Layout, name: str) -> RunConfig:
    """The chosen layout, stage for stage, at widths that build in a moment."""
    document = layout.config.model_dump()
    heads = document["lm"]["backbone"]["num_heads"]
    document["lm"]["backbone"] |= {"hidden_size": 4 * heads, "ffn_size": 16 * heads}
    document["lm"]["parallel"]["pipeline_layout"] = layout.layers
    return RunConfig.model_validate(document | {"name": name, "vocab_size": 1003})


def test_chosen_layouts_construct_up_to_1024_ranks(tmp_path: Path) -> None:
    cases = {"xl_64": ("calm-xl", 8, 1), "xl_512": ("calm-xl", 64, 1), "seven_1024": ("calm-7b", 128, 4)}
    configs: dict[str, RunConfig] = {}
    arguments: list[str] = []
    for name, (preset, nodes, min_pipeline) in cases.items():
        run = load(CONFIGS / "lm" / f"{preset}.yaml")
        layouts = layout_search.rank(run, nodes, device("h100"))
        chosen = next(x for x in layouts if x.config.lm and x.config.lm.parallel.pipeline >= min_pipeline)
        configs[name] = narrow(chosen, name)
        path = tmp_path / f"{name}.yaml"
        path.write_text(to_yaml(configs[name]), encoding="utf-8")
        arguments += [str(path), str(nodes * 8)]
    done = subprocess.run(
        [sys.executable, str(BUILDER), *arguments],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    built = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("built ")]
    assert [record["name"] for record in built] == list(configs)
    for record in built:
        expected = stage_parameters(configs[record["name"]])
        assert len(record["stages"]) == len(expected)
        for stage, (rank, count) in record["stages"].items():
            assert count == expected[int(stage)].trained, (record["name"], rank)


@pytest.mark.parametrize("override", ["lm.backbone.ffn_size=1", "lm.backbone.hidden_size=1000000000000"])
def test_a_report_on_extreme_widths_has_a_baseline_of_a_legal_width(override: str) -> None:
    from calm_scale.accounting.report.model_sections import crossover_section

    assert crossover_section(load(CONFIGS / "lm" / "calm-m.yaml", [override])).tables
