"""Documents that a program wrote and another one reads back: a damaged one is a message for people.

One way for every card, manifest, index and result: which file, which key, what is wrong there, what to do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from calm_scale.config.base import CalmScaleError, ConfigError

M = TypeVar("M", bound=BaseModel)
_SHOWN = 5


def read_object(
    path: Path, *, remedy: str = "", raises: type[CalmScaleError] = ConfigError
) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        remedy: what to do about a file that is missing or damaged.
        raises: the error's type.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise raises(_message(path, f"cannot be read: {error.strerror}", remedy)) from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested without end
        raise raises(_message(path, f"is damaged, not JSON: {error}", remedy)) from None
    if not isinstance(raw, dict):
        raise raises(_message(path, f"is damaged: a JSON {type(raw).__name__}, not an object", remedy))
    return raw


def checked(
    model: type[M],
    raw: object,
    where: object,
    *,
    remedy: str = "",
    raises: type[CalmScaleError] = ConfigError,
) -> M:
    """``raw`` as a model; ``where`` says whose values they are (a file, a key of it)."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise raises(_message(where, f"does not fit: {findings(error)}", remedy)) from None


def findings(error: ValidationError) -> str:
    """What pydantic found, in one line: ``key.path: what is wrong; …`` (the first five)."""
    found = error.errors(include_url=False, include_context=False)
    lines = [
        f"{'.'.join(map(str, item['loc']))}: {_in_words(item['type'], item['msg'])}".removeprefix(": ")
        for item in found[:_SHOWN]
    ]
    return "; ".join(lines) + (f"; … and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


def _in_words(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return "unknown key"
    return "missing" if kind == "missing" else message.removeprefix("Value error, ")


def _message(where: object, what: str, remedy: str) -> str:
    return f"{where}: {what}" + (f"; {remedy}" if remedy else "")
