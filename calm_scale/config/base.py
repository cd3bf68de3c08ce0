"""The base of every section: frozen, strict, and an error type written for people."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""A seed of random streams. Streams are keyed by signed 64-bit words, so a larger one would not fit."""


class CalmScaleError(Exception):
    """Base of every error meant for people; the command line prints its text without a traceback."""


class ConfigError(CalmScaleError, ValueError):
    """A user's configuration mistake: says what is wrong, where (file:line or key path), and what to do."""


class Section(BaseModel):
    """One section of the configuration file. Frozen; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


def findings(error: ValidationError) -> str:
    """What pydantic found, in one line for people: ``key.path: what is wrong; …`` (the first five)."""
    found = error.errors(include_url=False, include_context=False)
    lines = [
        f"{'.'.join(map(str, item['loc']))}: {_in_words(item['type'], item['msg'])}".removeprefix(": ")
        for item in found[:5]
    ]
    return "; ".join(lines) + (f"; … and {len(found) - 5} more" if len(found) > 5 else "")


def _in_words(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return "unknown key"
    return "missing" if kind == "missing" else message.removeprefix("Value error, ")
