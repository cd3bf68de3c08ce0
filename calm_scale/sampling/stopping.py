"""When a text ends, and how much of it may already be shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

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
