"""`calm-scale generate`: text from a checkpoint, streamed to the terminal or as JSON lines."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from calm_scale.config import RunConfig
from calm_scale.config.errors import EXIT_OK
from calm_scale.config.terminal import counted
from calm_scale.runtime.departure import joined
from calm_scale.stages.json_lines import given_texts, write_lines
from calm_scale.stages.model import open_model, refuse_spare_ranks, trained_tokenizer

if TYPE_CHECKING:
    from calm_scale.sampling.generate import Generation


def run_generation(
    config: RunConfig,
    *,
    prompts: Sequence[str],
    jsonl: Path | None = None,
    out: Path | None = None,
    step: int | None = None,
    tensor: int = 1,
) -> int:
    """Continue the prompts (``--prompt`` or a JSON-lines file; one empty prompt when there is none).

    A JSON-lines file is answered in JSON lines, and so is whatever goes to the file ``out``.
    ``tensor`` ranks hold the model, one part each; the first prints and writes.
    """
    from calm_scale.sampling.generate import generate
    from calm_scale.sampling.temperature import check_budget

    check_budget(config.generation.algorithm, config.generation)
    as_lines = jsonl is not None or out is not None
    with joined("generate", device=config.device, join_seconds=config.join_minutes * 60) as departure:
        world = departure.world
        world.on_first(lambda: refuse_spare_ranks(world, tensor, "generate"))
        texts = world.on_first(lambda: given_texts(prompts, jsonl, "prompt") or [""])
        tokenizer = trained_tokenizer(config, world, step)
        opened = open_model(config, world, step, tensor, tokenizer)
        streaming = not as_lines and len(texts) == 1 and world.is_first
        stream = _Stream(texts[0])
        done = generate(
            opened.model,
            tokenizer,
            texts,
            config.generation,
            on_text=stream if streaming else None,
            max_patches=config.require_lm().backbone.positions,
        )
    if not world.is_first:
        return EXIT_OK
    if as_lines:
        _write_lines(done, texts, out)
    elif streaming:
        stream.end()
    else:
        for completion in done.completions:
            sys.stdout.write(f"{texts[completion.index]}{completion.text}\n\n")
    _say_speed(done)
    return EXIT_OK


class _Stream:
    """The prompt and its continuation as it comes; nothing is shown of a prompt that is refused."""

    def __init__(self, prompt: str) -> None:
        self._pending = prompt

    def __call__(self, _index: int, text: str) -> None:
        sys.stdout.write(self._pending + text)
        sys.stdout.flush()
        self._pending = ""

    def end(self) -> None:
        """The last line ends."""
        self(0, "\n")


def _write_lines(done: Generation, texts: Sequence[str], out: Path | None) -> None:
    write_lines(({"prompt": texts[c.index], **dataclasses.asdict(c)} for c in done.completions), out)


def _say_speed(done: Generation) -> None:
    parts = ", ".join(f"{name} {spent:.2f} s" for name, spent in done.seconds.items())
    fallbacks = f", {counted(done.num_fallbacks, 'fall-back')}" if done.num_fallbacks else ""
    Console(stderr=True).print(
        f"{done.num_new_tokens} tokens at {done.tokens_per_s:.1f} tokens/s ({parts}); {done.sampler}: "
        f"{done.num_draws} draws for {done.num_patches} patches{fallbacks}{_heads(done)}",
        soft_wrap=True,
        highlight=False,
    )


def _heads(done: Generation) -> str:
    """How the prompts that ended inside a patch were completed; nothing where none did."""
    if not done.num_heads:
        return ""
    forced = f" ({done.num_forced_heads} forced: no draw agreed)" if done.num_forced_heads else ""
    return f"; {counted(done.num_heads, 'head')} {done.head_sampler}{forced}"
