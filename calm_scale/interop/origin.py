"""What an import keeps of a published folder beside its weights, and an export writes back: settings, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from calm_scale.config.data import TokenizerConfig
from calm_scale.config.files import checked, read_object
from calm_scale.config.section import Section
from calm_scale.interop import settings
from calm_scale.interop.files import InteropError, WeightFiles
from data_prep.errors import TokenizerError
from data_prep.tokenizer import load_tokenizer
from data_prep.tokenizer.definition import read_spec

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


def export_tokenizer(
    config: TokenizerConfig, path: Path, folder: Path, max_tokens: int
) -> dict[str, int | None]:
    """Writes ``tokenizer.json`` (also from tiktoken ranks) and ``tokenizer_config.json``.

    Args:
        config: the BOS/EOS policy, which becomes the tokenizer's post-processor.
        path: the run's tokenizer file or folder.
        max_tokens: context length in tokens.

    Returns:
        ``bos_token_id``, ``eos_token_id`` and ``pad_token_id``, for the model's config.json.
    """
    spec = read_spec(config, path)
    name_of = {number: name for name, number in spec.specials.items()}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
    }
    for kind, number in (("bos", spec.bos_id), ("eos", spec.eos_id), ("pad", spec.pad_id)):
        if number is not None and number in name_of:
            settings[f"{kind}_token"] = name_of[number]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(spec.json, encoding="utf-8")
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return {"bos_token_id": spec.bos_id, "eos_token_id": spec.eos_id, "pad_token_id": spec.pad_id}


def check_definition(file: Path) -> None:
    """Raises InteropError unless the file is a ``tokenizer.json`` that can be loaded."""
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise InteropError(
            f"{file} is not a tokenizer definition: {error}; download it again, or take it out of the folder"
        ) from None


def published_policy(folder: Path) -> TokenizerConfig:
    """The tokenizer settings under which a published ``tokenizer.json`` gives the ids that it gives its own readers.

    Its post-processor says whether BOS and EOS frame a text, ``tokenizer_config.json`` names the special tokens. A
    fast encoder that would give other ids is not used.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    native = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    special = {token.content for token in native.get_added_tokens_decoder().values() if token.special}
    named = _named_tokens(folder / "tokenizer_config.json")
    names = {f"{kind}_token": name for kind, name in named.items() if name in special}
    bare = TokenizerConfig.model_validate({"add_bos": False, "encoder": "tokenizers", **names})
    spec = read_spec(bare, path)
    framing = native.encode("").ids
    policy = {"add_bos": spec.bos_id in framing, "add_eos": spec.eos_id in framing}
    framed = bare.model_copy(update=policy)
    try:
        automatic = framed.model_copy(update={"encoder": "auto"})
        load_tokenizer(automatic, path)
    except TokenizerError:
        return framed
    return automatic


def _named_tokens(path: Path) -> dict[str, str]:
    """``bos``, ``eos`` and ``pad`` as tokenizer_config.json names them, a string or an object with ``content``."""
    if not path.is_file():
        return {}
    raw = read_object(path, remedy="download it again", raises=InteropError)
    found = {kind: raw.get(f"{kind}_token") for kind in ("bos", "eos", "pad")}
    texts = {
        kind: token.get("content") if isinstance(token, dict) else token for kind, token in found.items()
    }
    return {kind: text for kind, text in texts.items() if isinstance(text, str)}
