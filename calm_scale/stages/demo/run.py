"""The steps of the demo, in order, each the real command."""

from __future__ import annotations

import json
import time
from pathlib import Path

from rich.console import Console
from rich.rule import Rule

from calm_scale.config import RunConfig
from calm_scale.config.errors import EXIT_OK, EXIT_REQUEUE
from calm_scale.config.run_folder import RunFolder, Stage
from calm_scale.record.metrics import highest_step
from calm_scale.stages.demo.commands import (
    FIRST_LAYOUT,
    SECOND_LAYOUT,
    DemoError,
    DemoFolder,
    mpirun,
    run,
    shown,
)
from calm_scale.stages.demo.report import newest_layout
from calm_scale.stages.launch import this_program

PROMPTS = ("def ", "Return the ", "import ", "The ")


def run_demo(out: Path, *, quick: bool = False) -> int:
    """Run everything from nothing into ``out``; prints the summary at the end. Returns the exit code."""
    started = time.monotonic()
    console = Console()
    folder = DemoFolder(out)
    folder.start_anew()
    config = folder.write_document(quick)
    demo = _Demo(folder, config, console)
    demo.corpus()
    demo.prep()
    demo.autoencoder()
    demo.language_model()
    demo.evaluate()
    demo.generate()
    demo.account()
    from calm_scale.stages.demo.report import write_report

    write_report(
        folder,
        config,
        layouts=demo.layouts,
        seconds=time.monotonic() - started,
        commands=demo.typed,
        console=console,
    )
    return EXIT_OK


class _Demo:
    """One run of the demo; remembers what it typed, and in which layouts the language model really trained."""

    def __init__(self, folder: DemoFolder, config: RunConfig, console: Console) -> None:
        self.folder, self.config, self.console = folder, config, console
        self.document = str(folder.document)
        self.typed: list[str] = []
        self.layouts: list[str] = []

    def corpus(self) -> None:
        """Real text that every machine has, in the Pile's format, and a tokenizer trained on it."""
        from calm_scale.stages.demo.corpus import write_demo_corpus
        from data_prep.tokenizer.definition import train_bpe

        self._title("1 · corpus and tokenizer: this Python's documentation and sources")
        files = write_demo_corpus(self.folder.corpus)
        train_bpe(files, self.config.vocab_size, self.config.tokenizer_path)
        size = sum(file.stat().st_size for file in files)
        self.console.print(f"{len(files)} files, {size / 1e6:.1f} MB compressed, in {self.folder.corpus}")

    def prep(self) -> None:
        """Tokenize and pack under MPI."""
        self._title("2 · data prep on two MPI ranks")
        self._run(mpirun(2, this_program("prep", self.document)))

    def autoencoder(self) -> None:
        """Train and export the autoencoder."""
        self._title("3 · autoencoder under DeepSpeed ZeRO on two ranks")
        self._run(this_program("train-ae", self.document))

    def language_model(self) -> None:
        """Train in one layout, stop half way as a time limit would, go on in another layout."""
        half = self.config.require_lm().training.steps // 2
        lm = RunFolder(self.folder.run).stage(Stage.LM)
        self._title("4 · CALM on Megatron-core: tensor parallel 2, stopped half way")
        code = self._run(self._train_lm(FIRST_LAYOUT), stop_at=(lm.metrics, half))
        if code != EXIT_REQUEUE:
            raise DemoError("the job was told to stop half way, but ran to its end")
        self.layouts.append(newest_layout(lm.checkpoints))
        self._title("5 · resumed from the sharded checkpoint as pipeline parallel 2")
        self._run(self._train_lm(SECOND_LAYOUT))
        self.layouts.append(newest_layout(lm.checkpoints))

    def evaluate(self) -> None:
        """BrierLM on the held-out documents."""
        self._title("6 · BrierLM on held-out text")
        self._run(this_program("eval", self.document))

    def generate(self) -> None:
        """Samples by Algorithm 2."""
        self._title("7 · generation by likelihood-free temperature sampling")
        lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
        prompts = self.folder.out / "prompts.jsonl"
        prompts.write_text(lines, encoding="utf-8")
        self._run(
            this_program(
                "generate", self.document, "--jsonl", str(prompts), "--out", str(self.folder.samples)
            )
        )

    def account(self) -> None:
        """The FLOPs report of this run."""
        self._title("8 · FLOPs report")
        files = ("--html", str(self.folder.flops_report), "--json", str(self.folder.flops_numbers))
        self._run(this_program("flops", str(self.folder.run), "--short", *files))

    def _train_lm(self, layout: tuple[str, ...]) -> list[str]:
        return this_program("train-lm", self.document, *(word for item in layout for word in ("--set", item)))

    def _run(self, command: list[str], stop_at: tuple[Path, int] | None = None) -> int:
        self.typed.append(shown(command))
        stop_when = (lambda: highest_step(stop_at[0]) >= stop_at[1]) if stop_at else None
        return run(command, self.console, stop_when)

    def _title(self, text: str) -> None:
        self.console.print(Rule(text, align="left"))
