"""Floor 0: the whole configuration of a run as frozen, strict models. Imports no torch."""

from calm_scale.config.errors import CalmScaleError, ConfigError
from calm_scale.config.loading import config_hash, load, load_as, to_yaml
from calm_scale.config.run import RunConfig
from calm_scale.config.section import Section

__all__ = [
    "CalmScaleError",
    "ConfigError",
    "RunConfig",
    "Section",
    "config_hash",
    "load",
    "load_as",
    "to_yaml",
]
