"""What a published folder said of itself, kept in the imported run, so that an export gives it back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from calm_scale.config.files import checked, read_object
from calm_scale.config.section import Section
from calm_scale.interop import settings
from calm_scale.interop.files import InteropError, WeightFiles

if TYPE_CHECKING:
    from torch import Tensor

ORIGIN_FILE = "published.json"
_REMEDY = "import the published folder again"


class Stored(Section):
    """One folder: its config.json, and the data type of each of its tensors by name (``bfloat16``)."""

    config: dict[str, Any]
    dtypes: dict[str, str]

    @classmethod
    def of(cls, folder: Path) -> Stored:
        """Reads the folder; no weight is read."""
        files = WeightFiles(folder)
        named = {name: str(files.outline(name).dtype).removeprefix("torch.") for name in sorted(files.names)}
        return cls(config=settings.read(folder), dtypes=named)

    def as_stored(self, groups: Iterable[list[tuple[str, Tensor]]]) -> Iterator[list[tuple[str, Tensor]]]:
        """The tensors that the folder had, in the types it had them in."""
        for group in groups:
            kept = [(name, tensor.to(self._dtype(name))) for name, tensor in group if name in self.dtypes]
            if kept:
                yield kept

    def _dtype(self, name: str) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtypes[name])
        return found


class Origin(Section):
    """The published folders of a language model and of its autoencoder."""

    language_model: Stored
    autoencoder: Stored

    def write(self, run_folder: Path) -> None:
        """Into the imported run."""
        (run_folder / ORIGIN_FILE).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, run_folder: Path) -> Origin | None:
        """That of an imported run; None for a run that was not imported.

        Raises:
            InteropError: the file is damaged.
        """
        path = run_folder / ORIGIN_FILE
        if not path.is_file():
            return None
        return checked(cls, read_object(path, remedy=_REMEDY, raises=InteropError), path, raises=InteropError)

    def special_ids(self) -> Mapping[str, int | None]:
        """``bos_token_id``, ``eos_token_id`` and ``pad_token_id`` of the language model."""
        return {name: self.language_model.config.get(name) for name in settings.SPECIAL_IDS}
