"""The base of every section: frozen, strict, and an error type written for people."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class CalmScaleError(Exception):
    """Base of every error meant for people; the command line prints its text without a traceback."""


class ConfigError(CalmScaleError, ValueError):
    """A user's configuration mistake: says what is wrong, where (file:line or key path), and what to do."""


class Section(BaseModel):
    """One section of the configuration file. Frozen; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)
