"""Every field of a run and of a cluster profile: what it means, what it may be, and what a change of it does."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import isabstract
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from calm_scale.config.cluster import ClusterConfig
from calm_scale.config.errors import ConfigError
from calm_scale.config.lm import HEADS, HeadConfig, head_class
from calm_scale.config.run import RunConfig
from calm_scale.config.section import LARGEST_INTEGER, RESULTS, RESUME_WORDS, Policy, Section

CLUSTER = "cluster"
"""What the paths of a cluster profile's fields begin with."""
_TYPES = {int: "integer", float: "number", bool: "true or false", str: "text", Path: "path", dict: "mapping"}
_BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


@dataclass(frozen=True)
class Field:
    """One field: its path from the document's root, the section that holds it, and what a change of it does."""

    path: str
    section: type[Section]
    info: FieldInfo
    policy: Policy

    @property
    def name(self) -> str:
        """The last key of its path."""
        return self.path.rpartition(".")[2]

    @property
    def kind(self) -> str:
        """The kind of its section, where that is one of several."""
        kind = self.section.model_fields.get("kind")
        fixed = kind is not None and len(get_args(kind.annotation)) < 2 and isinstance(kind.default, str)
        return kind.default if kind is not None and fixed else ""

    @property
    def sections(self) -> list[type[Section]]:
        """The sections that its value may be; none where it is a value of its own."""
        return _sections_in(self.info.annotation)

    @property
    def text(self) -> str:
        """Its line of documentation."""
        return " ".join((self.info.description or "").split())

    @property
    def value(self) -> str:
        """What it may be, in words."""
        bounds = [
            f"{sign} {limit}"
            for name, sign in _BOUNDS.items()
            for item in self.info.metadata
            if (limit := getattr(item, name, None)) is not None and limit != LARGEST_INTEGER
        ]
        null = " or `null`" if NoneType in get_args(self.info.annotation) else ""
        return " ".join([_describe(self.info.annotation), ", ".join(bounds)]).strip() + null

    @property
    def default(self) -> str:
        """Its default as JSON, or that it has none."""
        default = self.info.get_default(call_default_factory=True, validated_data={})
        if default is PydanticUndefined:
            return "required"
        if isinstance(default, Section):
            return ""
        return json.dumps(to_jsonable_python(default), ensure_ascii=False)

    @property
    def effect(self) -> str:
        """What a change of it does, in words; empty for a cluster profile's."""
        words = [RESUME_WORDS[self.policy.resume]] if self.policy.resume else []
        words += ["decides the model"] if self.policy.model else []
        words += ["decides the shards"] if self.policy.prep else []
        return ", ".join(words)


def fields_of(model: type[Section], prefix: str = "", around: Policy | None = None) -> Iterator[Field]:
    """Every field of a document, sections before what is in them. Kinds of one section have the same paths."""
    for name, info in model.model_fields.items():
        policy = model.policy_on(name)
        field = Field(prefix + name, model, info, policy.inside(around) if around else policy)
        yield field
        for section in field.sections:
            yield from fields_of(section, f"{field.path}.", field.policy)


def policy_of(path: str, document: Mapping[str, Any] | None = None) -> Policy:
    """What a change of a run's field does.

    A field that this version does not know has the policy of its section, or changes results.

    Args:
        path: from the document's root; what lies inside of a value (``zero.overrides.x``) is judged as the value.
        document: says of which kind a section is that has several.
    """
    fields = [field for field in fields_of(RunConfig) if f"{path}.".startswith(f"{field.path}.")]
    nearest = max((len(field.path) for field in fields), default=0)
    found = [field for field in fields if len(field.path) == nearest]
    if not found:
        return RESULTS
    field = next((one for one in found if _is_of_kind(one, document)), found[0])
    if field.path == path or not field.sections:
        return field.policy
    unknown = field.sections[0].field_policy
    return (unknown if unknown.resume else RESULTS).inside(field.policy)


def keys_at(model: type[Section], keys: Sequence[str], document: Mapping[str, Any]) -> list[str]:
    """The keys that the section at a path of a document may have; a number among ``keys`` counts items of a list."""
    parent = "".join(f"{key}." for key in keys if not key.isdigit())
    found = [field for field in fields_of(model) if field.path == parent + field.name]
    named = [field.name for field in found if _is_of_kind(field, document)]
    return list(dict.fromkeys(named or [field.name for field in found]))


def _is_of_kind(field: Field, document: Mapping[str, Any] | None) -> bool:
    """Whether the document has the field's section, of its kind where there are several."""
    values: Any = document
    for key in field.path.split(".")[:-1]:
        values = values.get(key) if isinstance(values, Mapping) else None
    return not field.kind or (isinstance(values, Mapping) and values.get("kind") == field.kind)


def _sections_in(annotation: Any) -> list[type[Section]]:
    """The section classes in a type, each with its subclasses, which a user's package may add; no abstract ones."""
    built_in = [head_class(kind) for kind in HEADS] if annotation is HeadConfig else []
    if isinstance(annotation, type) and issubclass(annotation, Section):
        below = [section for one in annotation.__subclasses__() for section in _sections_in(one)]
        own = [] if isabstract(annotation) else [annotation]
        return list(dict.fromkeys([*built_in, *own, *below]))
    parts = [section for part in get_args(annotation) for section in _sections_in(part)]
    return list(dict.fromkeys(parts))


def _describe(annotation: Any) -> str:
    """A type in words, such as ``list of text``."""
    arguments = [one for one in get_args(annotation) if one not in (Ellipsis, NoneType)]
    origin = get_origin(annotation)
    if origin is Literal:
        return ", ".join(f"`{one}`" if isinstance(one, str) else f"`{json.dumps(one)}`" for one in arguments)
    if origin is tuple:
        return f"list of {_describe(arguments[0])}"
    if origin in (Annotated, None) or origin is dict:
        kind = arguments[0] if origin is Annotated else origin or annotation
        return "section" if _sections_in(kind) else _TYPES.get(kind) or _describe(kind)
    return " or ".join(dict.fromkeys(_describe(one) for one in arguments))


def documented(path: str = "") -> list[Field]:
    """The fields at a path and below it: a run's, or a cluster profile's below ``cluster``; all without a path.

    Raises:
        ConfigError: there is no such field; names the nearest.
    """
    fields = [*fields_of(RunConfig), *fields_of(ClusterConfig, f"{CLUSTER}.")]
    wanted = ".".join(key for key in path.split(".") if not key.isdigit())
    found = [field for field in fields if f"{field.path}.".startswith(f"{wanted}." if wanted else "")]
    if not found:
        near = difflib.get_close_matches(wanted, [field.path for field in fields], n=1, cutoff=0)
        raise ConfigError(f"{path}: no such field or section; the nearest is `{near[0]}`")
    return found


def explain(path: str = "") -> str:
    """The documentation of the fields at a path, for a terminal."""
    return "\n".join(_block(field) for field in documented(path) if not field.sections)


def _block(field: Field) -> str:
    default = field.default if field.default == "required" else f"default {field.default}"
    where = f"{field.path} (of kind {field.kind})" if field.kind else field.path
    lines = [f"{where}: {field.value.replace('`', '')} ({default})", f"    {field.text}"]
    if field.effect:
        lines.append(f"    When a run resumes: {field.effect}.")
    if field.policy.sweep:
        lines.append(f"    In a sweep: the runs differ from stage {field.policy.sweep} on.")
    return "\n".join(lines)


def markdown() -> str:
    """The documentation of every field in tables, one for each section of the documents."""
    tables: dict[type[Section], dict[str, list[Field]]] = {}
    for field in documented():
        parent = field.path.rpartition(".")[0]
        tables.setdefault(field.section, {}).setdefault(parent, []).append(field)
    swept = [
        f"`{field.path}` (from {field.policy.sweep} on)"
        for field in fields_of(RunConfig)
        if field.section is RunConfig and field.policy.sweep
    ]
    intro = f"`--sweep` takes {', '.join(swept)} and everything in them.\n"
    return "\n".join([intro, *(_table(section, by_path) for section, by_path in tables.items())])


def _table(section: type[Section], by_path: Mapping[str, Sequence[Field]]) -> str:
    """One section's fields, which are the same wherever the section stands."""
    fields = next(iter(by_path.values()))
    title = ", ".join(f"`{path}`" for path in by_path) if all(by_path) else "The run"
    title += f", kind `{fields[0].kind}`" * bool(fields[0].kind)
    columns = ["field", "value", "default", "meaning"]
    rows = [[f"`{one.name}`", one.value, f"`{one.default}`" * bool(one.default), one.text] for one in fields]
    if any(one.effect for one in fields):
        columns.append("when a run resumes")
        rows = [[*row, one.effect] for row, one in zip(rows, fields, strict=True)]
    lines = [columns, ["---"] * len(columns), *rows]
    text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    summary = " ".join((section.__doc__ or "").strip().split("\n\n")[0].split())
    return f"### {title}\n{summary}\n\n{text}\n"
