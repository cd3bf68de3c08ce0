"""The base of every section: frozen, strict, and an error type written for people."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""A seed of random streams. Streams are keyed by signed 64-bit words, so a larger one would not fit."""


class CalmScaleError(Exception):
    """Base of every error meant for people; the command line prints its text without a traceback."""


class ConfigError(CalmScaleError, ValueError):
    """A user's configuration mistake: says what is wrong, where (file:line or key path), and what to do."""


class Section(BaseModel):
    """One section of the configuration file. Frozen; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)
