"""Where a text begins and ends on a grid of K-token patches: prompts of any length, stops, text shown so far.

A prompt is split into full patches and a ragged head: the r = length mod K given tokens of the patch to come.
That patch is drawn like any other and kept only if it agrees with the given tokens, so nothing is ever padded in
the middle. A prompt shorter than one patch has no state to draw from; it gets the token that separates documents
(BOS, or EOS where the data has no BOS) in front of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from calm_scale.runtime.noise import Randomness, of_rows
from calm_scale.sampling.batch import PromptError, choose, exponent, take
from calm_scale.sampling.temperature import draw_rows

if TYPE_CHECKING:
    from torch import Tensor

    from calm_scale.lm.patch_model import PatchModel


_MOST_AT_ONCE = 2048  # candidates a round may grow to


class TextTokenizer(Protocol):
    """What generation needs of a tokenizer (``data_prep.tokenizer.Tokenizer`` has it)."""

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_id(self) -> int | None: ...

    @property
    def before_document(self) -> tuple[int, ...]: ...

    @property
    def boundary_id(self) -> int | None: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True)
class Prompt:
    """``full`` patches of K ids each, then ``given``: 0..K−1 ids of the next patch."""

    index: int
    ids: tuple[int, ...]  # without what is put before it
    full: tuple[tuple[int, ...], ...]
    given: tuple[int, ...]
    num_tokens: int
    num_front: int  # BOS (or EOS) tokens put in front to fill the first patch


def split_prompt(
    prompt: str | Sequence[int], index: int, tokenizer: TextTokenizer, patch_size: int, vocab_size: int
) -> Prompt:
    """Cuts a prompt (text, framed as the documents of the training data are, or ids as they are) into patches.

    Raises:
        PromptError: an id outside of the vocabulary, or a short prompt where no id separates documents.
    """
    framing = tokenizer.before_document if isinstance(prompt, str) else ()
    own = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    ids = [*framing, *own]
    wrong = [i for i in ids if not 0 <= i < vocab_size]
    if wrong:
        raise PromptError(
            f"prompt {index}: token id {wrong[0]} lies outside of the model's vocabulary of {vocab_size}"
        )
    front = max(0, patch_size - len(ids))
    boundary = tokenizer.boundary_id
    if front and boundary is None:
        raise PromptError(
            f"prompt {index} has {len(ids)} tokens, less than one patch of {patch_size}, and the data has neither BOS "
            "nor EOS to put in front of it (tokenizer.add_bos, tokenizer.add_eos); give a longer prompt"
        )
    ids = [boundary or 0] * front + ids
    stop = len(ids) // patch_size * patch_size
    full = tuple(tuple(ids[i : i + patch_size]) for i in range(0, stop, patch_size))
    return Prompt(index, tuple(own), full, tuple(ids[stop:]), len(ids) - front, front)


@dataclass(frozen=True)
class Heads:
    """Completed ragged heads.

    Attributes:
        patches: ids ``[R, K]``.
        agreed: bool ``[R]`` rows that agreed by themselves.
        fell_back: bool ``[R]`` rows not drawn at the temperature: forced, or chosen at an order below n.
        num_draws: draws made for all rows.
    """

    patches: Tensor
    agreed: Tensor
    fell_back: Tensor
    num_draws: int


def complete_heads(
    model: PatchModel,
    hidden: Tensor,
    given: Sequence[Sequence[int]],
    temperature: float,
    num_candidates: int,
    budget: int,
    generator: Randomness,
) -> Heads:
    """Draws a patch that begins with the given tokens, from P(patch | given) sharpened by Algorithm 2.

    N candidates in the first round, and in each further one as many as in all before it; the first round with
    agreeing candidates decides a row (at T = 1 that is exact: one of the agreeing draws, evenly). A row still without
    one after ``budget`` draws takes the candidate that agrees longest, with the given tokens written over it; it is
    reported as not agreed. That row has fallen back, and so has one whose choice was made at an order below n.

    Args:
        model: the law at T = 1.
        hidden: ``[R, d]`` states the patches are drawn from.
        given: 1..K−1 ids a row.
    """
    num_rows, k = len(given), model.patch_size
    device = hidden.device
    want = torch.full((num_rows, k), -1, dtype=torch.int64)
    for row, ids in enumerate(given):
        want[row, : len(ids)] = torch.tensor(list(ids))
    want = want.to(device)
    free = want < 0
    patches = torch.zeros_like(want)
    agreed = torch.zeros(num_rows, dtype=torch.bool, device=device)
    fell_back = torch.ones_like(agreed)
    order = exponent(temperature).n
    longest = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
    draws = spent = 0
    while spent < budget and not bool(agreed.all()):
        rows = (~agreed).nonzero()[:, 0]
        number = min(max(num_candidates, min(spent, _MOST_AT_ONCE)), budget - spent)
        candidates = draw_rows(model, hidden[rows], number, of_rows(generator, rows))
        spent, draws = spent + number, draws + number * len(rows)
        fits = (candidates == want[rows]) | free[rows]
        agree = fits.all(-1)  # [N, r]
        found = agree.any(0)
        length = fits.long().cumprod(-1).sum(-1)
        best = length.argmax(0)
        better = length.amax(0) > longest[rows]
        patches[rows[better]] = take(candidates, best)[better]
        longest[rows] = torch.maximum(longest[rows], length.amax(0))
        if bool(found.any()):
            source = of_rows(generator, rows[found])
            choice = choose(candidates[:, found], temperature, source, agree[:, found])
            patches[rows[found]] = take(candidates[:, found], choice.index)
            agreed[rows[found]] = True
            fell_back[rows[found]] = choice.fell_back(order)
    return Heads(torch.where(free, patches, want), agreed, fell_back, draws)


Finish = Literal["eos", "stop", "length"]
_PARTIAL = "\N{REPLACEMENT CHARACTER}"


class OpenText:
    """The growing continuation of one prompt.

    Tokens come a patch at a time; those after an end token inside a patch are dropped, and so is all beyond
    ``max_new_tokens``. A stop string ends the text before it, wherever it straddles patches.

    A tokenizer may read a token otherwise at the beginning of a text (SentencePiece drops its space), so the new
    tokens are decoded behind the prompt's: prompt and continuation together are what the tokenizer makes of all ids.

    Args:
        decode: ids → text.
        prompt: the prompt's ids, without BOS.
        stop_ids: end-of-text ids (EOS, and BOS, which begins the next document).
        stop: stop strings.
        max_new_tokens: limit.
        on_text: called with each new piece of text that is final.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt: Sequence[int],
        stop_ids: frozenset[int],
        stop: Sequence[str],
        max_new_tokens: int,
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        self.ids: list[int] = []
        self.finish: Finish | None = None
        self._decode, self._stop_ids, self._limit = decode, stop_ids, max_new_tokens
        self._prompt = list(prompt)
        self._before = decode(self._prompt)
        self._stop = [s for s in stop if s]
        self._on_text = on_text
        self._shown = 0
        self._cut: str | None = None

    @property
    def text(self) -> str:
        """The continuation, without the stop string."""
        return self._continuation() if self._cut is None else self._cut

    def _continuation(self) -> str:
        whole = self._decode(self._prompt + self.ids)
        if whole.startswith(self._before):
            return whole[len(self._before) :]
        begun = self._before.rstrip(
            _PARTIAL
        )  # the prompt ended inside a character that the new tokens complete
        return whole[len(begun) :] if whole.startswith(begun) else self._decode(self.ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Adds the new tokens of one patch."""
        for token in ids:
            if self.finish is None:
                self._add(token)
        if self._on_text is not None:
            self._show()

    def _add(self, token: int) -> None:
        if token in self._stop_ids:
            self.finish = "eos"
            return
        self.ids.append(token)
        if self._stop:
            text = self._continuation()
            places = [place for s in self._stop if (place := text.find(s)) >= 0]
            if places:
                self._cut, self.finish = text[: min(places)], "stop"
                return
        if len(self.ids) >= self._limit:
            self.finish = "length"

    def _show(self) -> None:
        text = self.text
        safe = len(text) if self.finish is not None else self._safe_length(text)
        if safe > self._shown and self._on_text is not None:
            self._on_text(text[self._shown : safe])
            self._shown = safe

    def _safe_length(self, text: str) -> int:
        """Up to here no later token changes the text: no half character, no beginning of a stop string."""
        safe = len(text.rstrip(_PARTIAL))
        for s in self._stop:
            for size in range(min(len(s) - 1, safe), 0, -1):
                if text[:safe].endswith(s[:size]):
                    safe -= size
                    break
        return safe
