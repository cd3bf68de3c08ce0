"""Text from a model: prompts of any length, one backbone position a patch, stops inside a patch, time by part."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from calm_scale.runtime.noise import RowStreams, of_rows, stream_seed
from calm_scale.sampling.batch import PromptError
from calm_scale.sampling.clock import Clock, TimedModel
from calm_scale.sampling.prompts import Finish, OpenText, Prompt, TextTokenizer, complete_heads, split_prompt
from calm_scale.sampling.temperature import DrawTally, TemperedModel

if TYPE_CHECKING:
    from torch import Tensor

    from calm_scale.config.evaluation import GenerationConfig
    from calm_scale.lm.patch_model import PatchModel

OnText = Callable[[int, str], None]
Head = Literal["none", "agreed", "forced"]


@dataclass(frozen=True)
class Completion:
    """One prompt's continuation. ``head`` says how a prompt that ended inside a patch was completed."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    num_prompt_tokens: int
    num_front_bos: int
    head: Head


@dataclass(frozen=True)
class Generation:
    """All completions in the prompts' order, and what they cost.

    ``num_fallbacks`` counts patches not drawn at the temperature: Algorithm 1 out of budget, Algorithm 2 at an order
    below n, and heads, which Algorithm 2 completes whatever the algorithm, for either that or being forced.
    ``seconds`` are exclusive: ``backbone``, ``head`` and ``decoder`` (or ``head + decoder``), ``sampling``
    (Algorithm 1 or 2 around the draws), ``text`` (stops and decoding), ``other``.
    """

    completions: tuple[Completion, ...]
    sampler: str
    seconds: Mapping[str, float]
    num_new_tokens: int
    num_patches: int
    num_draws: int
    num_fallbacks: int
    head_sampler: str

    @property
    def num_heads(self) -> int:
        """Prompts that ended inside a patch and had it completed."""
        return sum(c.head != "none" for c in self.completions)

    @property
    def num_forced_heads(self) -> int:
        """Heads whose given tokens no candidate agreed with."""
        return sum(c.head == "forced" for c in self.completions)

    @property
    def total_seconds(self) -> float:
        """Wall time of the whole call."""
        return sum(self.seconds.values())

    @property
    def tokens_per_s(self) -> float:
        """New tokens of all rows over wall time."""
        return self.num_new_tokens / max(self.total_seconds, 1e-9)


def generate(
    model: PatchModel,
    tokenizer: TextTokenizer,
    prompts: Sequence[str | Sequence[int]],
    config: GenerationConfig,
    on_text: OnText | None = None,
    max_patches: int | None = None,
) -> Generation:
    """Continues every prompt until an end token, a stop string or ``max_new_tokens``.

    Prompts are batched by length. Rows of a batch run in step: one that still has prompt patches feeds those
    while others already feed what they drew, so a ragged batch needs neither padding nor masks.
    A text depends on the seed, its prompt and how often that prompt came before: each prompt has a stream of random
    numbers of its own, whatever stands beside it in a batch (up to the rounding of a batched forward pass).

    Args:
        model: any PatchModel; on tensor-parallel ranks every rank calls this with the same arguments.
        tokenizer: see ``TextTokenizer``.
        prompts: texts (framed as the training data's documents are) or ready token ids.
        config: sampling rule and limits.
        on_text: called with (prompt index, new text) as text becomes final.
        max_patches: positions of the model's context, prompt and continuation together; None does not check.

    Raises:
        PromptError: a prompt the model cannot read, or longer than its context.
    """
    clock = Clock(model.device)
    started = time.perf_counter()
    timed = TimedModel(model, clock)
    tempered = TemperedModel(timed, config.algorithm, config)
    split = [split_prompt(p, i, tokenizer, model.patch_size, model.vocab_size) for i, p in enumerate(prompts)]
    if max_patches is not None:
        _check_context(split, config.max_new_tokens, model.patch_size, max_patches)
    split.sort(key=lambda p: (len(p.full), p.index))
    seeds = _seeds(split, config.seed)
    done: list[Completion] = []
    with torch.no_grad():
        for begin in range(0, len(split), config.batch_size):
            rows = split[begin : begin + config.batch_size]
            batch = _Batch(tempered, timed, tokenizer, rows, config, on_text)
            done += batch.run([seeds[prompt.index] for prompt in rows])
    seconds = dict(clock.seconds)
    seconds["other"] = max(0.0, time.perf_counter() - started - sum(seconds.values()))
    tally = tempered.tally
    return Generation(
        completions=tuple(sorted(done, key=lambda c: c.index)),
        sampler=tempered.sampler,
        seconds=seconds,
        num_new_tokens=sum(len(c.token_ids) for c in done),
        num_patches=tally.num_patches,
        num_draws=tally.num_draws,
        num_fallbacks=tally.num_fallbacks,
        head_sampler=_head_sampler(tempered, min(config.num_candidates, config.draw_budget)),
    )


class _Batch:
    """Prompts that run in step over one cache."""

    def __init__(
        self,
        tempered: TemperedModel,
        timed: TimedModel,
        tokenizer: TextTokenizer,
        prompts: Sequence[Prompt],
        config: GenerationConfig,
        on_text: OnText | None,
    ) -> None:
        self.tempered, self.timed, self.clock = tempered, timed, timed.clock
        self.prompts, self.config = prompts, config
        self.tally: DrawTally = tempered.tally
        stops = frozenset(i for i in (tokenizer.eos_id, tokenizer.bos_id) if i is not None)
        self.texts = [
            OpenText(
                tokenizer.decode, p.ids, stops, config.stop, config.max_new_tokens, _speaker(on_text, p.index)
            )
            for p in prompts
        ]
        self.heads: list[Head] = ["none"] * len(prompts)

    def run(self, seeds: Sequence[int]) -> list[Completion]:
        """Continues the prompts; ``seeds`` has one for each."""
        model, k = self.timed, self.timed.patch_size
        generator = RowStreams.seeded(seeds, model.device)
        shortest = min(len(p.full) for p in self.prompts)
        state = model.begin(len(self.prompts), self._num_patches(k))
        first = torch.tensor([p.full[:shortest] for p in self.prompts], device=model.device)
        hidden = model.advance(state, first)
        for place in self._places(shortest):
            patches = self._next_patches(place, hidden, generator)
            if all(text.finish for text in self.texts):
                break
            hidden = model.advance(state, patches[:, None])
        return [self._completion(row) for row in range(len(self.prompts))]

    def _places(self, shortest: int) -> Iterator[int]:
        return iter(range(shortest, self._num_patches(self.timed.patch_size) + 1))

    def _num_patches(self, k: int) -> int:
        """Patches of the longest row, prompt and continuation."""
        return max(_patches_needed(p, self.config.max_new_tokens, k) for p in self.prompts)

    def _next_patches(self, place: int, hidden: Tensor, generator: RowStreams) -> Tensor:
        """Ids ``[B, K]`` at patch index ``place``: prompt, completed head, or drawn; finished rows repeat zeros."""
        k = self.timed.patch_size
        patches = torch.zeros(len(self.prompts), k, dtype=torch.int64, device=hidden.device)
        heads: list[int] = []
        drawn: list[int] = []
        for row, prompt in enumerate(self.prompts):
            if place < len(prompt.full):
                patches[row] = torch.tensor(prompt.full[place], device=hidden.device)
            elif self.texts[row].finish is None:
                (heads if place == len(prompt.full) and prompt.given else drawn).append(row)
        with self.clock.part("sampling"):
            if heads:
                patches[heads] = self._complete(heads, hidden, generator)
            if drawn:
                patches[drawn] = self.tempered.draw(hidden[drawn], 1, of_rows(generator, drawn))[0]
            listed = patches.tolist()
        with self.clock.part("text"):
            for row in heads:
                self.texts[row].extend(listed[row][len(self.prompts[row].given) :])
            for row in drawn:
                self.texts[row].extend(listed[row])
        return patches

    def _complete(self, rows: list[int], hidden: Tensor, generator: RowStreams) -> Tensor:
        heads = complete_heads(
            self.tempered.source,
            hidden[rows],
            [self.prompts[row].given for row in rows],
            self.tempered.head_temperature,
            self.config.num_candidates,
            self.config.draw_budget,
            of_rows(generator, rows),
        )
        for row, agreed in zip(rows, heads.agreed.tolist(), strict=True):
            self.heads[row] = "agreed" if agreed else "forced"
        self.tally.add(len(rows), heads.num_draws, int(heads.fell_back.sum()))
        return heads.patches

    def _completion(self, row: int) -> Completion:
        prompt, text = self.prompts[row], self.texts[row]
        return Completion(
            index=prompt.index,
            text=text.text,
            token_ids=tuple(text.ids),
            finish=text.finish or "length",
            num_prompt_tokens=prompt.num_tokens,
            num_front_bos=prompt.num_front,
            head=self.heads[row],
        )


def _seeds(prompts: Sequence[Prompt], seed: int) -> dict[int, int]:
    """The seed of each prompt, by its index: a function of ``seed``, the prompt and its place among equal prompts."""
    seen: Counter[tuple[object, ...]] = Counter()
    seeds = {}
    for prompt in sorted(prompts, key=lambda p: p.index):
        key = (prompt.full, prompt.given)
        digest = hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()
        seeds[prompt.index] = stream_seed("generate", seed, digest, seen[key])
        seen[key] += 1
    return seeds


def _head_sampler(tempered: TemperedModel, num_candidates: int) -> str:
    """How a ragged head is completed, in words: with Algorithm 2's weights whatever draws the other patches.

    ``num_candidates``: of the first round.
    """
    if tempered.head_temperature == 1:
        return f"among the agreeing of N = {num_candidates} or more draws"
    return f"by Algorithm 2, N = {num_candidates} or more"


def _patches_needed(prompt: Prompt, max_new_tokens: int, k: int) -> int:
    return len(prompt.full) + -(-(len(prompt.given) + max_new_tokens) // k)


def _check_context(prompts: Sequence[Prompt], max_new_tokens: int, k: int, max_patches: int) -> None:
    for prompt in prompts:
        need = _patches_needed(prompt, max_new_tokens, k) - 1  # the last patch is written, not read again
        if need > max_patches:
            raise PromptError(
                f"prompt {prompt.index} ({prompt.num_tokens} tokens) and {max_new_tokens} new tokens need {need} "
                f"patches of {k}, the model's context has {max_patches}; shorten one of them"
            )


def _speaker(on_text: OnText | None, index: int) -> Callable[[str], None] | None:
    return None if on_text is None else lambda text: on_text(index, text)
