"""The report in all its forms: right numbers, honest gaps, one self-contained page that a browser shows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from calm_scale.accounting.compared_models import paper_model
from calm_scale.accounting.components import Comparison
from calm_scale.accounting.costs import token_costs, tokens_per_step
from calm_scale.accounting.goodput import UtilizationError
from calm_scale.accounting.report.build import Subject, build, emit
from calm_scale.accounting.report.document import Document, text_of
from calm_scale.accounting.report.render import print_document, to_html, to_json, to_markdown
from calm_scale.accounting.report.run_sections import Prices
from calm_scale.config import RunConfig, config_hash
from calm_scale.config.quantities import flops_text, scaled
from calm_scale.record.json_lines import append_lines
from calm_scale.record.ledger import Event, LedgerError, line_of

MakeRun = Callable[..., RunConfig]


def tables_of(document: Document) -> dict[str, dict[str, Any]]:
    sections = json.loads(to_json(document))["sections"]
    return {key: table for section in sections.values() for key, table in section["tables"].items()}


def write_run(folder: Path, config: RunConfig, *, device: str = "cpu", train_seconds: float = 50.0) -> None:
    """Steps 0 to 6, killed; resumed from 4 to the end at 10."""
    each = tokens_per_step(config)
    shared: dict[str, Any] = {"stage": "lm", "world_size": 2, "device": device, "precision": "bf16"}
    first = {"steps_done": 6, "tokens": 6 * each, "seconds": {"train": train_seconds, "save": 10.0}}
    second = {"steps_done": 6, "tokens": 6 * each, "seconds": {"train": train_seconds, "eval": 5.0}}
    events = [
        Event("start", 0, step=0, time=0.0, **shared),
        Event("progress", 0, step=6, time=80.0, **shared, **first),
        Event("start", 1, step=4, time=100.0, first_step=4, highest_step=6, **shared),
        Event(
            "stop", 1, step=10, time=180.0, first_step=4, highest_step=6, cause="finished", **shared, **second
        ),
    ]
    for event in events:
        append_lines(folder / "lm" / "ledger.jsonl", [line_of(event)])


def write_score(folder: Path, step: int, brierlm: float | None) -> None:
    score = {
        "brierlm": brierlm,
        "brierlm_interval": None if brierlm is None else [brierlm - 0.1, brierlm + 0.1],
        "undefined_because": "not positive: Brier-4" if brierlm is None else None,
    }
    path = folder / "eval" / f"step_{step:08d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": "calm-scale evaluation 1", "score": score, "protocol": {}}))


def test_run_account_counts_replays_as_waste(tiny: MakeRun, tmp_path: Path) -> None:
    config = tiny()
    write_run(tmp_path, config)
    tables = tables_of(build([Subject(config, tmp_path)]))
    rows = {row["what"].strip(): row for row in tables["balance_lm"]["rows"]}
    each, flops = tokens_per_step(config), token_costs(config).training
    assert rows["planned"]["flops"] == pytest.approx(10 * each * flops)
    assert rows["progress"]["steps"] == 10
    assert rows["progress"]["tokens"] == pytest.approx(10 * each)
    assert rows["wasted: replayed steps"]["steps"] == 2
    assert rows["executed, model FLOPs"]["flops"] == pytest.approx(12 * each * flops)
    hours = sum(row["device_hours"] or 0 for key, row in rows.items() if not key.startswith("executed"))
    assert hours == pytest.approx(rows["executed, hardware FLOPs"]["device_hours"]) == 2 * 160 / 3600
    attempts = tables["attempts_lm"]["rows"]
    assert [row["cause"] for row in attempts] == ["killed", "finished"]
    assert [row["replayed"] for row in attempts] == [0, 2]
    assert all(row["mfu"] is None for row in attempts)
    times = tables["time_lm"]["rows"]
    kinds = ("progress", "replay", "eval", "save", "stall", "load", "other")
    assert [sum(row[kind] for kind in kinds) for row in times] == [80, 80]
    assert [(row["save"], row["eval"]) for row in times] == [(10, 0), (0, 5)]
    assert times[1]["replay"] == pytest.approx(50 * 2 / 6)
    assert times[0]["goodput"] == pytest.approx(50 / 80)


def test_unreadable_lines_are_noted_and_only_nothing_readable_is_refused(
    tiny: MakeRun, tmp_path: Path
) -> None:
    config, book = tiny(), tmp_path / "lm" / "ledger.jsonl"
    write_run(tmp_path, config)
    book.write_text('{"time":0}\n' + book.read_text())
    assert "lm: ledger.jsonl has 1 unreadable line (1)" in to_markdown(build([Subject(config, tmp_path)]))
    book.write_text('{"time":0}\n')
    with pytest.raises(LedgerError, match="Nothing is left to report"):
        build([Subject(config, tmp_path)])


def test_unknown_device_is_said_and_impossible_speed_is_refused(tiny: MakeRun, tmp_path: Path) -> None:
    config = tiny()
    write_run(tmp_path / "cpu", config)
    assert "MFU unavailable: no peak" in to_markdown(build([Subject(config, tmp_path / "cpu")]))
    write_run(tmp_path / "known", config, device="NVIDIA H200")
    tables = tables_of(build([Subject(config, tmp_path / "known")]))
    assert all(0 < row["mfu"] <= row["hfu"] < 1 for row in tables["attempts_lm"]["rows"])
    write_run(tmp_path / "fast", config, device="NVIDIA H200", train_seconds=1e-12)
    with pytest.raises(UtilizationError, match="world size"):
        build([Subject(config, tmp_path / "fast")])


def test_run_without_a_ledger_says_so(tiny: MakeRun, tmp_path: Path) -> None:
    assert "holds no ledger" in to_markdown(build([Subject(tiny(), tmp_path)]))


def test_prices_are_asked_for_never_assumed(tiny: MakeRun, tmp_path: Path) -> None:
    write_run(tmp_path, tiny())
    plain = tables_of(build([Subject(tiny(), tmp_path)]))["balance_lm"]["note"]
    assert "$" not in plain and "kWh" not in plain
    prices = Prices(dollars_per_device_hour=2.0, watts_per_device=500.0)
    priced = tables_of(build([Subject(tiny(), tmp_path)], prices=prices))["balance_lm"]["note"]
    assert "$0.18" in priced and "0.0444 kWh at 500 W" in priced


def test_scores_of_several_runs_stand_on_the_flops_axis(tiny: MakeRun, tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    write_score(good, 10, 1.25)
    write_score(bad, 5, None)
    document = build([Subject(tiny(), good), Subject(tiny(), bad)])
    rows = tables_of(document)["brierlm"]["rows"]
    assert [(row["step"], row["brierlm"]) for row in rows] == [(10, 1.25), (5, None)]
    section = next(s for s in document.sections if s.key == "brierlm")
    assert len(section.pictures) == 1


def test_page_is_self_contained_and_escaped(tiny: MakeRun, tmp_path: Path) -> None:
    config = tiny()
    write_run(tmp_path, config)
    path = tmp_path / "ledger"
    path.mkdir()
    note = "<script>alert(1)</script>"
    twins = {config.name: [Comparison("forward", 10, 9, note)]}
    document = build([Subject(config, tmp_path)], twins=twins)
    page = to_html(document)
    assert "<script" not in page and "&lt;script&gt;" in page
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    assert "@import" not in page and "url(" not in page
    num_tables = sum(len(section.tables) for section in document.sections)
    num_pictures = sum(len(section.pictures) for section in document.sections)
    assert page.count("<table") == num_tables > 10
    assert page.count("<img src=") == num_pictures >= 3


def test_same_input_same_pictures(tiny: MakeRun) -> None:
    def pictures() -> list[str]:
        document = build([Subject(tiny(), None)])
        return [picture.draw() for section in document.sections for picture in section.pictures]

    assert pictures() == pictures()


def test_json_and_markdown_carry_every_table(
    tiny: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = build([Subject(tiny(), None), Subject(paper_model("Transformer-S"), None)])
    out = tmp_path / "deep" / "report.json"
    emit(document, json_file=out, html_file=tmp_path / "report.html", markdown=True)
    printed = capsys.readouterr().out
    assert (
        json.loads(out.read_text())["sections"]["table1"]["tables"]["table1"]["rows"][5]["model"] == "CALM-XL"
    )
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    for section in document.sections:
        assert f"## {section.title}" in printed
    assert "| CALM-XL | 1.83 G | 1.82 G | +0.5 % |" in printed


def test_layout_sections_name_the_fullest_stage(tiny: MakeRun) -> None:
    config = tiny(parallel={"tensor": 2, "pipeline": 2, "data": 1})
    text = to_markdown(build([Subject(config, None)]))
    assert "tensor 2 × pipeline 2 × data 1" in text
    assert "Fullest: stage" in text
    tables = tables_of(build([Subject(config, None)]))
    assert sum(row["share"] for row in tables["stages"]["rows"]) == pytest.approx(1)
    total = sum(row["total"] for row in tables["stages"]["rows"])
    assert total == pytest.approx(token_costs(config).hardware)
    assert {row["group"] for row in tables["communication"]["rows"]} == {"tensor", "pipeline"}


@pytest.mark.parametrize("mode", ["energy", "flow", "diffusion", "softmax"])
def test_every_head_is_reported(tiny: MakeRun, mode: str) -> None:
    config = tiny(head={"kind": mode}, patch_size=1 if mode == "softmax" else 2)
    assert "Provenance" in to_markdown(build([Subject(config, None)]))


def test_two_runs_of_one_name_are_both_reported(tiny: MakeRun, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, tiny())
    document = build([Subject(tiny(), tmp_path / "a"), Subject(tiny(), tmp_path / "b")])
    keys = [section.key for section in document.sections]
    assert len(keys) == len(set(keys))
    assert {"run.tiny", "run.tiny-2"} <= set(keys)
    hashes = [
        row["value"] for row in tables_of(document)["provenance"]["rows"] if "configuration" in row["what"]
    ]
    assert hashes == [config_hash(tiny())] * 2


def test_open_data_parallel_size_is_taken_from_the_run(tiny: MakeRun, tmp_path: Path) -> None:
    write_run(tmp_path, tiny())
    assert "tensor 1 × pipeline 1 × data 2" in to_markdown(build([Subject(tiny(), tmp_path)]))


def test_autoencoder_only_run_is_reported() -> None:
    config = paper_model("CALM-M").model_copy(update={"lm": None})
    assert "decoder.logits" in to_markdown(build([Subject(config, None)]))


def test_narrow_terminal_turns_wide_tables() -> None:
    console = Console(width=100, force_terminal=True, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    print_document(build([Subject(paper_model("CALM-M"), None)]), console)
    text = console.export_text()
    line = next(line for line in text.splitlines() if "Training FLOPs" in line)
    assert "1.986e21" in line


def test_cells_are_written_for_people() -> None:
    assert flops_text(3.564e20) == "3.564e20"
    assert flops_text(2.906e8) == "291 M"
    assert text_of(None, "flops") == "n/a"
    assert text_of(1234567, "integer") == "1\u202f234\u202f567"
    assert text_of(-0.037, "deviation") == "-3.7 %"
    assert scaled(999_960, ("", "k", "M")) == "1.00 M"
    assert scaled(512, ("B", "KiB"), 1024.0) == "512 B"


def test_short_report_says_what_runs_did_and_where_the_rest_is(
    tiny: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a long path would take lines of its own
    monkeypatch.delenv("COLUMNS", raising=False)  # nor is the page narrower than a log's
    run, html = Path("run"), Path("flops.html")
    run.mkdir()
    write_run(run, tiny())
    whole = build([Subject(tiny(), run)])
    emit(whole, html_file=html, short=True)
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) < 25
    assert "2 attempts, step 10 reached, goodput" in printed
    assert f"whole report: {html}" in printed
    assert html.read_text() == to_html(whole) + "\n"


def browser() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


@pytest.mark.skipif(browser() is None, reason="no Chromium on this machine: the page is not shown")
def test_page_in_a_real_browser(tiny: MakeRun, tmp_path: Path) -> None:
    write_run(tmp_path, tiny())
    page = tmp_path / "report.html"
    measure = "<script>document.title = innerWidth + ' ' + document.documentElement.scrollWidth</script>"
    page.write_text(to_html(build([Subject(tiny(), tmp_path)])) + measure, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    logged = ["--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"]
    shown = subprocess.run(
        [str(browser()), *flags, *logged, "--window-size=390,800", "--dump-dom", page.as_uri()],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "CONSOLE" not in shown.stderr
    assert shown.stdout.count("<table") > 10
    assert "planned, done, wasted" in shown.stdout
    found = re.search(r"<title>(\d+) (\d+)</title>", shown.stdout)
    assert found is not None
    wide, needed = map(int, found.groups())
    assert needed <= wide, "tables and pictures scroll by themselves; the page fits a phone's width"
