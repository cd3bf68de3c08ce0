"""The published autoencoder (28 tensors at 2 + 2 layers) ↔ ours. Names are the same; the tie is made explicit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from calm_scale.autoencoder.export import load_weights
from calm_scale.autoencoder.model import TIED_ALIAS, Autoencoder, Decoder, Encoder
from calm_scale.config.autoencoder import AutoencoderModelConfig, ObjectiveConfig
from calm_scale.interop import settings
from calm_scale.interop.files import (
    Container,
    InteropError,
    Shape,
    WeightFiles,
    check_depth,
    check_shape,
    write_weights,
)
from calm_scale.interop.origin import Stored

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDING = "encoder.embed_tokens.weight"


@dataclass(frozen=True)
class PublishedAutoencoder:
    """An imported autoencoder and what its config.json says of its training."""

    model: Autoencoder
    objective: ObjectiveConfig
    stored_vocab_size: int


def import_autoencoder(folder: Path, vocab_size: int | None = None) -> PublishedAutoencoder:
    """Reads a published autoencoder folder.

    Args:
        folder: config.json and weights (safetensors or .bin, whole or sharded).
        vocab_size: V to keep: rows beyond are cut off (128 257 → 128 256 drops the padding row), missing ones
            are zero. None keeps what is stored.

    Raises:
        InteropError: names every missing or unexpected tensor, or one whose shape config.json contradicts; or an
            output weight that is not the embedding.
    """
    config, objective, stored, patch_size = settings.autoencoder_sections(settings.read(folder), folder)
    files = WeightFiles(folder)
    return build(config, objective, files, "", vocab_size or stored, patch_size, {stored})


def build(
    config: AutoencoderModelConfig,
    objective: ObjectiveConfig,
    files: WeightFiles,
    prefix: str,
    vocab_size: int,
    patch_size: int,
    stored_vocab_sizes: Collection[int],
) -> PublishedAutoencoder:
    """An autoencoder from the tensors under a prefix ('' or ``ae_model.``).

    Args:
        vocab_size: V of the result; the embedding is cut or padded to it.
        stored_vocab_sizes: numbers of rows that the stored embedding may have.

    Raises:
        InteropError: see ``import_autoencoder``.
    """
    check_depth(files, config.encoder_layers + config.decoder_layers)
    shapes = {prefix + name: shape for name, shape in _shapes(config, patch_size, files.folder).items()}
    alias = prefix + TIED_ALIAS
    found = {name for name in files.names if name.startswith(prefix)}
    check_names(files.folder, shapes, found - {alias})
    for name, shape in shapes.items():
        rows = stored_vocab_sizes if name == prefix + EMBEDDING else shape[:1]
        check_shape(files, name, *((n, *shape[1:]) for n in rows))
    model = Autoencoder(config, vocab_size, patch_size)
    stored = files.get(prefix + EMBEDDING)
    if alias in found and not torch.equal(files.get(alias), stored):
        raise InteropError(
            f"{files.folder}: {alias} differs from {prefix}{EMBEDDING}; the published model ties them, these "
            "weights are not from it"
        )
    weights = {name.removeprefix(prefix): files.get(name) for name in shapes}
    weights[EMBEDDING] = resize_rows(stored, vocab_size)
    load_weights(model, weights, str(files.folder))
    return PublishedAutoencoder(model.eval().requires_grad_(False), objective, len(stored))


def _shapes(config: AutoencoderModelConfig, patch_size: int, folder: Path) -> dict[str, Shape]:
    """Published name → shape, at V = 1 and without the alias; no memory is taken."""
    try:
        with torch.device("meta"):
            encoder = Encoder(config, 1, patch_size)
            decoder = Decoder(config, patch_size, encoder.token_embedding)
    except (RuntimeError, OverflowError, TypeError) as error:  # TypeError: beyond 64 bits
        raise InteropError(
            f"{folder}: its config.json describes an autoencoder that no memory could hold: {error}"
        ) from None
    halves = (("encoder.", encoder), ("decoder.", decoder))
    shapes = {at + name: tuple(p.shape) for at, half in halves for name, p in half.named_parameters()}
    return {name: shape for name, shape in shapes.items() if name != TIED_ALIAS}


def export_autoencoder(
    model: Autoencoder,
    objective: ObjectiveConfig,
    folder: Path,
    *,
    container: Container = "bin",
    vocab_size: int | None = None,
    special_ids: Mapping[str, int | None] | None = None,
    stored: Stored | None = None,
    max_shard_bytes: int = 2 << 30,
) -> None:
    """Writes an autoencoder in the published layout, the tied alias included.

    Args:
        vocab_size: rows to write; above V, zero rows are appended (128 257 for the published padding token).
        special_ids: of its tokenizer.
        stored: the folder it was imported from, whose config.json, names and data types are given back.
    """
    rows = vocab_size or model.vocab_size
    made = settings.autoencoder_config(model.config, objective, rows, model.patch_size, special_ids)
    groups = published_groups(model, "", rows)
    settings.write(made if stored is None else stored.config, folder)
    write_weights(folder, groups if stored is None else stored.as_stored(groups), container, max_shard_bytes)


def published_groups(model: Autoencoder, prefix: str, vocab_size: int) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors of an autoencoder under a prefix, in groups that must share a file."""
    for name, parameter in model.unique_parameters():
        tensor = parameter.detach().cpu()
        if name == EMBEDDING:
            tensor = resize_rows(tensor, vocab_size)
            yield [(prefix + name, tensor), (prefix + TIED_ALIAS, tensor)]
        else:
            yield [(prefix + name, tensor)]


def resize_rows(table: Tensor, num_rows: int) -> Tensor:
    """The first rows of ``[V, a]``, or the table with zero rows appended."""
    if num_rows <= len(table):
        return table[:num_rows]
    return torch.cat([table, table.new_zeros(num_rows - len(table), *table.shape[1:])])


def check_names(origin: Path, wanted: Iterable[str], found: Iterable[str]) -> None:
    """Raises InteropError that lists missing and unexpected names."""
    wanted, found = set(wanted), set(found)
    problems = []
    for what, names in (("missing", wanted - found), ("unexpected", found - wanted)):
        if names:
            problems.append(f"{what} ({len(names)}): " + ", ".join(sorted(names)))
    if problems:
        raise InteropError(f"{origin} does not have the published layout. " + "; ".join(problems))


def same_weights(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    """Names whose tensors differ."""
    return sorted(name for name in a if name not in b or not torch.equal(a[name], b[name]))
