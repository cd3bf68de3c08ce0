"""Objects from a user's own package, which a configuration names: ``package.module:attribute``, or an entry point."""

from __future__ import annotations

import functools
import importlib
from importlib.metadata import entry_points
from typing import Any

from calm_scale.config.errors import ConfigError


@functools.cache
def load_extension(name: str, group: str, key: str) -> Any:
    """The object called ``name``, looked up once a process: a schedule asks at every step.

    Args:
        name: ``package.module:attribute``, or the name of an entry point of ``group``.
        group: where installed packages register such objects, as ``calm_scale.document_sources``.
        key: the setting that holds ``name``, for the message.

    Raises:
        ConfigError: there is no such object, or its module cannot be imported.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{key}: {name!r} cannot be loaded ({error}); install the package, or set PYTHONPATH to its folder"
            ) from None
    registered = {entry.name: entry for entry in entry_points(group=group)}
    if name not in registered:
        known = ", ".join(sorted(registered)) or "none"
        raise ConfigError(
            f"{key}: {name!r} is not registered in the entry-point group {group} (registered: {known}); "
            "name it `package.module:attribute`, or install the package that registers it"
        )
    try:
        return registered[name].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key}: the entry point {name!r} cannot be loaded ({error})") from None
