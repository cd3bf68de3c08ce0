"""The base of every section, the policy of its fields, and what a written value means, in YAML and `--set` alike."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from calm_scale.config.run_folder import Stage

LARGEST_INTEGER = 2**63
"""Integers of a document are below it: 64 bits with a sign."""
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")

Seed = Annotated[int, Field(ge=0, lt=LARGEST_INTEGER)]
"""A seed of random streams. Streams are keyed by signed 64-bit words, so a larger one would not fit."""


Resume = Literal["safe", "results", "forbidden"]
"""What a changed field does when a run resumes: nothing to its results; changes them, so that ``--accept`` is needed;
cannot go on from that checkpoint."""


RESUME_WORDS: Mapping[Resume, str] = {
    "safe": "safe to change",
    "results": "changes results: needs --accept",
    "forbidden": "forbidden",
}


@dataclass(frozen=True)
class Policy:
    """What a change of a field does. It stands on the field (``Annotated[int, SAFE]``) or, for every field that has
    none of its own, on the section's class (``field_policy``).

    Attributes:
        resume: what the change does when a run resumes; None on a field that is a section, whose own fields say it.
        model: the field decides the function that a checkpoint's weights compute, so that evaluation and generation
            refuse another value.
        prep: the field decides the bytes that prep writes.
        sweep: the first stage that a sweep over the field runs anew; without one it may not be swept. As ``job``, it
            holds for everything in a section.
        job: the first stage whose finished job does not count once the field has changed.
    """

    resume: Resume | None = None
    model: bool = False
    prep: bool = False
    sweep: Stage | None = None
    job: Stage | None = None

    def inside(self, section: Policy) -> Policy:
        """This policy of a field in a section, with the section's stages where it names none."""
        return replace(self, sweep=self.sweep or section.sweep, job=self.job or section.job)


SAFE = Policy("safe")
RESULTS = Policy("results")
FORBIDDEN = Policy("forbidden")
OF_THE_MODEL = Policy("forbidden", model=True)
DECIDES_THE_SHARDS = Policy("safe", prep=True)


class Section(BaseModel):
    """One section of the configuration file. Frozen; an unknown key is an error; values are read by one rule.

    Every field has a docstring: one line with its unit, which `config explain` prints.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
    field_policy: ClassVar[Policy] = Policy()

    @classmethod
    def policy_on(cls, name: str) -> Policy:
        """The policy of one field: its own, or that of every field of the section."""
        own = (item for item in cls.model_fields[name].metadata if isinstance(item, Policy))
        return next(own, cls.field_policy)

    def settings_that(self, decide: Callable[[Policy], bool]) -> dict[str, Any]:
        """The fields, also of sections inside, whose policy says so, as JSON values."""
        return {
            name: _settings_in(getattr(self, name), decide, dumped)
            for name, dumped in self.model_dump(mode="json").items()
            if decide(self.policy_on(name))
        }

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        return as_written(cls.model_fields[str(info.field_name)].annotation, value)


def _settings_in(value: Any, decide: Callable[[Policy], bool], dumped: Any) -> Any:
    if isinstance(value, Section):
        return value.settings_that(decide)
    if isinstance(value, tuple) and value and isinstance(value[0], Section):
        return [item.settings_that(decide) for item in value]
    return dumped


def as_written(annotation: Any, value: Any) -> Any:
    """``value`` in the form that a field of type ``annotation`` takes; pydantic checks the rest.

    A number is a number: not a truth value, not a text. ``1e3`` and ``10.0`` are integers; ``1/3`` is a third. One
    item is a list of one. A path begins at the home directory where it begins with ``~``.

    Raises:
        ValueError: a truth value or a text stands where a number belongs, an integer is outside of 64 bits, or ``~``
            names a user that this machine does not know.
    """
    if value is None:
        return None
    if (item := _item_of(annotation)) is not None:
        items = value if isinstance(value, list | tuple) else [value]
        return [as_written(item, one) for one in items]
    kinds = _kinds(annotation)
    if isinstance(value, list | tuple):
        inside = next((one for one in map(_item_of, get_args(annotation)) if one is not None), None)
        return value if inside is None else [as_written(inside, one) for one in value]
    if kinds & {int, float} and not isinstance(value, dict):
        return _number(value, kinds)
    if Path in kinds and isinstance(value, str | Path):
        return written_out(os.fspath(value))
    return value


def expand_user(path: str) -> str:
    """The path with the home directory in place of a leading ``~`` or ``~user``.

    Raises:
        ValueError: this machine does not know the user.
    """
    if not path.startswith("~"):
        return path
    try:
        return str(Path(path).expanduser())
    except RuntimeError:
        user = path.split("/", maxsplit=1)[0]
        raise ValueError(f"{user} names no home directory on this machine; write the path out") from None


def written_out(path: str) -> str:
    """As :func:`expand_user`; a variable, which nothing would put a value for, is refused.

    Raises:
        ValueError: it names a variable, or this machine does not know the user.
    """
    if found := _VARIABLE.search(path):
        raise ValueError(f"{found.group()} is a variable, which is not expanded here; write the path out")
    return expand_user(path)


PathText = Annotated[str, AfterValidator(written_out)]
"""A text that names a file or a folder (a glob, a place on another node), read like a ``Path``."""

NodePathText = Annotated[str, AfterValidator(expand_user)]
"""A text in which a node expands variables, or which is meant literally; ``~`` means the same as in a ``Path``."""


def one_line(text: str) -> str:
    """The text itself, for a place in a job script.

    Raises:
        ValueError: it has control characters, such as a line break.
    """
    if any(ord(char) < 32 for char in text):
        raise ValueError("a value of a cluster profile is one line without control characters")
    return text


Line = Annotated[str, AfterValidator(one_line)]
LinePath = Annotated[PathText, AfterValidator(one_line)]


def _item_of(annotation: Any) -> Any:
    """X of ``tuple[X, ...]``, else None."""
    arguments = get_args(annotation)
    is_list = get_origin(annotation) is tuple and len(arguments) == 2 and arguments[1] is Ellipsis
    return arguments[0] if is_list else None


def _kinds(annotation: Any) -> set[type]:
    """The plain types that a scalar of this annotation may have; a ``Literal`` has those of its values."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    if isinstance(annotation, type):
        return {annotation}
    if get_origin(annotation) in (tuple, dict):
        return set()
    return {kind for part in get_args(annotation) for kind in _kinds(part)}


def _number(value: Any, kinds: set[type]) -> Any:
    if isinstance(value, bool):
        if bool in kinds:
            return value
        raise ValueError(f"should be a number, not the truth value `{str(value).lower()}`")
    if isinstance(value, str):
        return _number_in_text(value, kinds)
    if float not in kinds and isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and abs(value) >= LARGEST_INTEGER:
        raise ValueError(f"should be less than {LARGEST_INTEGER} (64 bits)")
    return value


def _number_in_text(text: str, kinds: set[type]) -> Any:
    if float in kinds and "/" in text:  # 0.333 is not a third, and costs Algorithm 1 its fractional stage
        try:
            return float(Fraction(text.replace(" ", "")))
        except (ValueError, ZeroDivisionError, OverflowError):
            raise ValueError("is not a fraction of two whole numbers, such as 1/3") from None
    if str in kinds:  # a word instead of a number, such as `auto`
        return text
    raise ValueError(
        "should be a number in decimal digits, without quotes, leading zeros or colons, such as 10, 0.5 or 1e-3"
    )
