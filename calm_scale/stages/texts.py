"""`calm-scale generate` and `score`: texts from a model, and how well given texts fit it, as text or JSON lines."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from calm_scale.checkpoint.card import Card
from calm_scale.config import ConfigError, RunConfig
from calm_scale.config.errors import EXIT_OK
from calm_scale.config.files import write_output
from calm_scale.config.quantities import counted
from calm_scale.runtime.departure import joined
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


def run_scoring(
    config: RunConfig,
    *,
    texts: Sequence[str],
    jsonl: Path | None = None,
    out: Path | None = None,
    step: int | None = None,
    tensor: int = 1,
) -> int:
    """Print, or write to ``out``, one JSON line a text: the energy score per patch and per token.

    The score is the training loss, with the run's ``alpha``; the baseline's is its cross-entropy.

    A text too short to score, or longer than the model's context, gets nulls and the reason.

    Raises:
        ConfigError: no text can be scored.
    """
    from calm_scale.evaluation.energy import score_texts

    with joined("score", device=config.device, join_seconds=config.join_minutes * 60) as departure:
        world = departure.world
        world.on_first(lambda: refuse_spare_ranks(world, tensor, "score"))
        wanted = world.on_first(lambda: given_texts(texts, jsonl, "text"))
        tokenizer = trained_tokenizer(config, world, step)
        opened = open_model(config, world, step, tensor, tokenizer)
        ids = [[*tokenizer.before_document, *tokenizer.encode(text)] for text in wanted]
        reasons = [_unfit(config, len(tokens)) for tokens in ids]
        if all(reasons):
            raise ConfigError(f"nothing to score: {reasons[0]}; give a text of another length")
        fitting = [tokens for tokens, why in zip(ids, reasons, strict=True) if why is None]
        scores = iter(score_texts(opened.model, fitting, alpha=_alpha(opened.card), seed=config.seed))
        rows = [
            {"text": text, **(asdict(next(scores)) if why is None else _unscored(len(tokens), why))}
            for text, tokens, why in zip(wanted, ids, reasons, strict=True)
        ]
        if world.is_first:
            write_lines(rows, out)
        return EXIT_OK


def _alpha(card: Card) -> float:
    """The exponent of the energy loss the model was trained with; 1 for a head that is trained otherwise."""
    head = card.config["lm"]["head"]
    return float(head.get("alpha", 1.0))


def _unfit(config: RunConfig, num_tokens: int) -> str | None:
    """Why a text of so many tokens cannot be scored, or None."""
    from calm_scale.evaluation.energy import too_long, too_short

    k = config.patch_size
    return too_short(num_tokens, k) or too_long(num_tokens, k, config.require_lm().backbone.positions)


def _unscored(num_tokens: int, why: str) -> dict[str, Any]:
    """The row of a text that is too short or too long."""
    empty = {"kind": None, "per_patch": None, "per_token": None, "num_patches": 0, "num_unscored": num_tokens}
    return {**empty, "reason": why}


def given_texts(given: Sequence[str], jsonl: Path | None, key: str) -> list[str]:
    """The texts of the repeated option ``--key``, then those of the lines of ``jsonl``.

    Raises:
        ConfigError: names the option, or file and line, of what is no text.
    """
    for text in given:
        _refuse_half_characters(text, f"--{key}")
    return [*given, *(read_texts(jsonl, key) if jsonl is not None else [])]


def read_texts(path: Path, key: str) -> list[str]:
    """The text under ``key`` of every line; blank lines and a byte order mark are passed over.

    Raises:
        ConfigError: names file and line of what is not a JSON object with that text, or an empty file.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    texts: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[key]
        except (ValueError, KeyError, TypeError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise ConfigError(f'{path}:{number}: expected a JSON object such as {{"{key}": "The sea"}}')
        _refuse_half_characters(text, f"{path}:{number}")
        texts.append(text)
    if not texts:
        raise ConfigError(f"{path}: holds no {key}")
    return texts


def write_lines(rows: Iterable[Mapping[str, Any]], out: Path | None) -> None:
    """One JSON object a line, to the file ``out`` in UTF-8, or to stdout; a stdout that is not UTF-8 gets escapes."""
    plain = out is None and not (sys.stdout.encoding or "").lower().startswith("utf")
    lines = "".join(json.dumps(row, ensure_ascii=plain, allow_nan=False) + "\n" for row in rows)
    if out is None:
        sys.stdout.write(lines)
    else:
        write_output(out, lines)


def _refuse_half_characters(text: str, where: str) -> None:
    """Python reads a byte of the command line that is not UTF-8 as half a surrogate pair, too."""
    if text.isascii():
        return
    half = next((letter for letter in text if "\ud800" <= letter <= "\udfff"), None)
    if half is None:
        return
    if "\udc80" <= half <= "\udcff" and where.startswith("--"):
        raise ConfigError(f"{where}: the byte 0x{ord(half) - 0xDC00:02x} is not UTF-8; give UTF-8 text")
    raise ConfigError(f"{where}: half a surrogate pair (\\ud800 … \\udfff) is no character")
