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
