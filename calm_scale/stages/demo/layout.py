"""Where the demo keeps things, and the run document it hands to every command."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import yaml

from calm_scale.config import RunConfig, load
from calm_scale.stages.demo.commands import DemoError

FIRST_LAYOUT = ("lm.parallel.tensor=2", "lm.parallel.pipeline=1")
SECOND_LAYOUT = ("lm.parallel.tensor=1", "lm.parallel.pipeline=2")
MARKER = ".calm-scale-demo"


@dataclass(frozen=True)
class DemoFolder:
    """The demo's folder: corpus, run document, run folder, report."""

    out: Path

    @property
    def corpus(self) -> Path:
        """The Pile-format text."""
        return self.out / "corpus"

    @property
    def document(self) -> Path:
        """The run's YAML; every command of the demo takes it."""
        return self.out / "demo.yaml"

    @property
    def run(self) -> Path:
        """The run folder (`workdir`)."""
        return self.out / "run"

    @property
    def report(self) -> Path:
        """The page to open."""
        return self.out / "report.html"

    @property
    def flops_report(self) -> Path:
        """The FLOPs report."""
        return self.out / "flops.html"

    @property
    def flops_numbers(self) -> Path:
        """The FLOPs report for programs."""
        return self.out / "flops.json"

    @property
    def summary(self) -> Path:
        """The result for programs."""
        return self.out / "summary.json"

    @property
    def samples(self) -> Path:
        """Generated text, JSON lines."""
        return self.out / "samples.jsonl"

    def start_anew(self) -> None:
        """Remove what an earlier demo left here; refuse a folder that is something else.

        Raises:
            DemoError: the folder is not empty and was not made by the demo.
        """
        if self.out.exists() and any(self.out.iterdir()):
            if not (self.out / MARKER).exists():
                raise DemoError(
                    f"{self.out}: holds other files; give the demo a folder of its own with --out"
                )
            shutil.rmtree(self.out)
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / MARKER).touch()

    def write_document(self, quick: bool) -> RunConfig:
        """Write the run's YAML (preset plus this folder's paths) and return it resolved."""
        preset = presets() / ("quick.yaml" if quick else "demo.yaml")
        document = {
            "extends": str(preset),
            "name": "demo",
            "workdir": str(self.run.resolve()),
            "prep": {"sources": [{"paths": [str(self.corpus.resolve() / "*.jsonl.zst")]}]},
        }
        self.document.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
        return load(self.document)


def presets() -> Path:
    """The folder ``configs/demo``, which a link carries into the installed package."""
    return (Path(__file__).parent / "presets").resolve()
