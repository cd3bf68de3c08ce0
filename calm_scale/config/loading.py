"""From a YAML file, its `extends:` and `--set` overrides to a validated document."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from calm_scale.config.errors import ConfigError
from calm_scale.config.fields import keys_at
from calm_scale.config.run import RunConfig
from calm_scale.config.run_folder import CONFIG_FILE, TRAINED, RunFolder
from calm_scale.config.section import Section, expand_user
from calm_scale.config.yaml_source import Dumper, KeyPath, Source, parse_value, read, with_value

S = TypeVar("S", bound=Section)
_ALWAYS_WRITTEN = frozenset(
    ("name", "workdir", "seed", "vocab_size", "patch_size", "tokenizer", "data", "prep", "autoencoder", "lm")
)
"""Keys of every resolved document; a person leaves some of them out or has an ``extends``."""


def load(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """The run described by a file or stored in a run's folder, with ``--set a.b=c`` overrides laid on top.

    A file may name others in ``extends:`` (a path or a list, relative to itself); later ones win, the file
    itself wins over all. ``name`` defaults to the file's stem. A stored document (``RUN``, ``RUN/config.yaml``) is
    that of the run in the folder it lies in, whatever ``workdir`` it holds.

    Raises:
        ConfigError: a folder that holds no run; every mistake at once: key path, file:line, what is wrong, the nearest
            valid key.
    """
    file = Path(path)
    if file.is_dir():
        if not (file / CONFIG_FILE).is_file():
            raise ConfigError(f"{file}: not a run folder, it holds no {CONFIG_FILE}")
        file /= CONFIG_FILE
    return load_as(RunConfig, file, overrides)


def load_as(model: type[S], path: Path | str, overrides: Sequence[str] = ()) -> S:
    """Like :func:`load` for any section model (a cluster profile, for example)."""
    file = Path(path)
    source = resolve(file)
    if model is RunConfig and is_stored(file, read(file).values):
        source = Source(placed_in(file.parent, source.values), source.places)
    source = with_overrides(source, overrides)
    if "name" in model.model_fields:
        source.values.setdefault("name", file.stem)
    return validate(model, source, origin=str(file))


def resolve(path: Path, seen: tuple[Path, ...] = ()) -> Source:
    """A file laid over everything it extends."""
    real = path.resolve()
    if real in seen:
        raise ConfigError(f"{path}: `extends` goes in a circle: {' → '.join(p.name for p in (*seen, real))}")
    source = read(path)
    parents = source.values.pop("extends", [])
    if isinstance(parents, str):
        parents = [parents]
    if not isinstance(parents, list) or not all(isinstance(p, str) for p in parents):
        raise ConfigError(f"{source.places[('extends',)]}: `extends` is a path or a list of paths")
    base = Source({})
    for parent in parents:
        base = resolve(path.parent / expand_user(parent), (*seen, real)).over(base)
    return source.over(base)


def is_stored(file: Path, values: Mapping[str, Any]) -> bool:
    """Whether ``file``, which holds ``values``, is what a run stored in its folder, and not a document of a user's."""
    run = RunFolder(file.parent)
    written = (run.data, run.evaluations, run.slurm, *(run.stage(stage).path for stage in TRAINED))
    return (
        file.name == CONFIG_FILE
        and values.keys() >= _ALWAYS_WRITTEN
        and "extends" not in values
        and any(folder.is_dir() for folder in written)
    )


def placed_in(folder: Path, document: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved ``document`` of the run that lies in ``folder`` now.

    Paths below the folder it was in are taken below ``folder``. Other relative ones are relative to where the run was
    started; where ``folder`` ends with the stored relative ``workdir``, that is known, else they stay as they are.
    """
    if "workdir" not in document:
        return {**document, "workdir": str(folder)}
    stored = Path(expand_user(str(document["workdir"])))
    if stored.resolve() == folder.resolve():
        return dict(document)
    start = _started_in(stored, folder.resolve())

    def place(text: object) -> object:
        if text is None:
            return None
        path = Path(expand_user(str(text)))
        if path.is_relative_to(stored):
            return str(folder / path.relative_to(stored))
        return str(path if start is None else start / path)

    placed = {**document, "workdir": str(folder), "data": place(document.get("data"))}
    for section, key in (("tokenizer", "path"), ("lm", "autoencoder")):
        values = document.get(section)
        if isinstance(values, dict) and values.get(key) is not None:
            placed[section] = {**values, key: place(values[key])}
    return placed


def _started_in(stored: Path, folder: Path) -> Path | None:
    """The folder below which ``stored`` names ``folder``."""
    length = len(stored.parts)
    if stored.is_absolute() or (length and folder.parts[-length:] != stored.parts):
        return None
    return Path(*folder.parts[: len(folder.parts) - length])


def with_overrides(source: Source, overrides: Iterable[str]) -> Source:
    """Lay ``a.b=value`` texts over a document."""
    for text in overrides:
        key, separator, value = text.partition("=")
        keys = tuple(part.strip() for part in key.split("."))
        if not separator or not all(keys):
            raise ConfigError(
                f"--set {_shortened(text)}: write it as key.path=value, for example lm.training.steps=100"
            )
        try:
            values = with_value(source.values, keys, parse_value(value, f"--set {_shortened(text)}"))
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"--set {_shortened(text)}: {error}") from None
        source = Source(values, {**source.places, keys: f"--set {_shortened(text)}"})
    return source


def _shortened(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:99]}…"


def validate(model: type[S], source: Source, origin: str) -> S:
    """Build the model; turn pydantic's findings into one error for people."""
    try:
        return model.model_validate(source.values)
    except ValidationError as error:
        lines = [_finding(model, source, origin, item) for item in error.errors(include_url=False)]
        raise ConfigError("\n".join(lines)) from None


def _finding(model: type[Section], source: Source, origin: str, item: Any) -> str:
    keys = _written_keys(source.values, tuple(str(part) for part in item["loc"]))
    where = _place(source, keys, origin)
    message = str(item["msg"]).removeprefix("Value error, ")
    name = ".".join(keys) or "the document"
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(keys[-1], keys_at(model, keys[:-1], source.values), n=1, cutoff=0.4)
        message = "unknown key" + (f"; did you mean `{near[0]}`?" if near else "")
    elif item["type"] == "missing":
        message = "required, but not given"
    elif not isinstance(item.get("input"), dict | Section):
        message += f" (got {item.get('input')!r})"
        if item["type"] in ("string_type", "path_type") and isinstance(item.get("input"), int | float):
            message += "; quote it to make it a text"
    return f"{where}: `{name}`: {message}"


def _place(source: Source, keys: KeyPath, origin: str) -> str:
    """Where the finding's key was written, and the ``--set`` options that reach into it."""
    options = [
        place
        for key, place in source.places.items()
        if place.startswith("--set") and key[: len(keys)] == keys
    ]
    if options and keys and keys not in source.places:
        return ", ".join(options)
    written = next(
        (source.places[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in source.places), origin
    )
    others = [option for option in options if option != written]
    return written + (f" with {', '.join(others)}" if others else "")


def _written_keys(values: Any, loc: KeyPath) -> KeyPath:
    """The location as the user wrote it: pydantic inserts the tag of a union (`energy`) after `head`."""
    keys: list[str] = []
    for part in loc:
        inside = isinstance(values, dict) and part in values
        indexed = isinstance(values, list) and part.isdigit() and int(part) < len(values)
        if inside or indexed or part == loc[-1]:
            keys.append(part)
            values = values[part] if inside else values[int(part)] if indexed else None
    return tuple(keys)


def to_yaml(config: Section) -> str:
    """The resolved document as YAML; loading it again gives an equal document."""
    text: str = yaml.dump(config.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, allow_unicode=True)
    return text


def config_hash(config: Section) -> str:
    """SHA-256 (first 16 hex digits) of the resolved document, independent of key order and formatting."""
    canonical = json.dumps(config.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
