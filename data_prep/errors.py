"""The room's errors. Every message says what is wrong, where, and what to do."""

from __future__ import annotations

from calm_scale.config.base import CalmScaleError


class PrepError(CalmScaleError):
    """Preparing the data cannot go on."""


class ShardError(CalmScaleError):
    """A shard or manifest is missing, damaged, incomplete, or not what it says it is."""


class SourceError(PrepError):
    """An input cannot be read: missing, truncated, corrupt, or changed while it was being read."""


class TokenizerError(PrepError):
    """A tokenizer cannot be loaded, or two encoders disagree."""


class EncoderMismatchError(TokenizerError):
    """A fast encoder gave other ids than the reference on a document of the corpus.

    ``reference`` names the encoder that is right.
    """

    def __init__(self, text: str, reference: str) -> None:
        super().__init__(text, reference)
        self.text, self.reference = text, reference

    def __str__(self) -> str:
        """The message alone."""
        return self.text
