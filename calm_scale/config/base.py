"""The base of every section: frozen, strict, and an error type written for people."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from calm_scale.config.exit_codes import EXIT_ERROR, EXIT_USAGE
from calm_scale.config.values import as_written

Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""A seed of random streams. Streams are keyed by signed 64-bit words, so a larger one would not fit."""


class CalmScaleError(Exception):
    """Base of every error meant for people; the command line prints its text without a traceback and ends with
    ``exit_code``. ``may_pass``: whether the same command may succeed later or on another node, as it stands.
    ``shared_from``: the rank on which it occurred, once every rank of the job has it."""

    exit_code: ClassVar[int] = EXIT_ERROR
    may_pass: ClassVar[bool] = False
    shared_from: int | None = None


class ConfigError(CalmScaleError, ValueError):
    """A user's configuration mistake: says what is wrong, where (file:line or key path), and what to do."""

    exit_code: ClassVar[int] = EXIT_USAGE


class Section(BaseModel):
    """One section of the configuration file. Frozen; an unknown key is an error; values are read by one rule."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        return as_written(cls.model_fields[str(info.field_name)].annotation, value)
