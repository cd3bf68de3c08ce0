"""The published CALM (288 tensors at 16 layers and 4 head blocks, 28 of them the autoencoder's) ↔ ours.

Weights travel a tensor at a time between published files and sharded checkpoints: no model is built, so the
layout of either side does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from calm_scale.autoencoder.model import Autoencoder
from calm_scale.config.run import RunConfig
from calm_scale.interop import autoencoder as published_autoencoder
from calm_scale.interop import settings
from calm_scale.interop.autoencoder import check_names, resize_rows, same_weights
from calm_scale.interop.files import (
    Container,
    InteropError,
    WeightFiles,
    check_depth,
    check_shape,
    write_weights,
)
from calm_scale.interop.origin import Stored
from calm_scale.interop.slots import EMBEDDING, HEAD, HEAD_ALIAS, Slot, published_shapes, slots_of
from calm_scale.lm.model import CalmModel
from calm_scale.lm.pieces import pieces_of
from calm_scale.lm.sharded import MODEL_PREFIX, stored_shapes, write_shards

if TYPE_CHECKING:
    from torch import Tensor

AE_PREFIX = "ae_model."


class PublishedLanguageModel:
    """A published language-model folder, read a tensor at a time.

    Args:
        folder: config.json and weights. Either head alias is enough; when both are there they must agree.
        autoencoder_folder: the autoencoder's published folder. None: the one embedded under ``ae_model.``, whose
            settings then come from ``autoencoder_config`` (a dict as in its config.json). The ``ae_path`` in
            config.json, a path on its authors' machine, is never followed.
        vocab_size: V to keep; see ``import_autoencoder``.
        name, fields: of the run made for it.

    Raises:
        InteropError: names every missing or unexpected tensor; a tensor of a wrong shape or type; an embedded
            autoencoder that is not the given one.
    """

    def __init__(
        self,
        folder: Path,
        autoencoder_folder: Path | None = None,
        *,
        autoencoder_config: dict[str, object] | None = None,
        vocab_size: int | None = None,
        name: str = "imported",
        **fields: object,
    ) -> None:
        self.files = WeightFiles(folder)
        raw = settings.read(folder)
        raw_autoencoder = self._autoencoder_settings(autoencoder_folder, autoencoder_config, raw)
        self.run: RunConfig = settings.published_run(
            raw, raw_autoencoder, name, vocab_size, (folder, autoencoder_folder), **fields
        )
        stage = self.run.require_lm()
        check_depth(self.files, stage.backbone.num_layers + stage.num_blocks)
        self.slots = slots_of(stage)
        self._slot_of = {slot.key: slot for slot in self.slots}
        self._check_names()
        stored = settings.stored_vocab_size(raw)
        for weight, shape in published_shapes(self.run, stored).items():
            check_shape(self.files, self._stored_name(weight), shape)
        self.autoencoder: Autoencoder = self._load_autoencoder(autoencoder_folder, raw_autoencoder, stored)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Our global keys and whole tensors, one alive at a time."""
        for slot in self.slots:
            yield slot.key, self._joined(slot)

    def weight(self, key: str) -> Tensor:
        """The whole tensor of one of our global keys."""
        return self._joined(self._slot_of[key])

    def read_through(self) -> None:
        """Reads every weight once and keeps none.

        Raises:
            InteropError: names one that is damaged or not finite.
        """
        for slot in self.slots:
            for name in slot.names:
                self.files.get(self._stored_name(name))

    def shapes(self) -> Iterator[tuple[str, torch.Size, torch.dtype]]:
        """Our global keys, and what their tensors will be; reads no weight."""
        for slot in self.slots:
            outline = self._joined(slot, outline=True)
            yield slot.key, outline.shape, outline.dtype

    @torch.no_grad()
    def fill(self, models: Sequence[CalmModel]) -> None:
        """Copies the weights into this rank's stages, whatever the layout; rows of padding stay as they are.

        Raises:
            InteropError: a parameter of ours gets no weight, or a shape does not fit.
        """
        pieces = pieces_of(models)
        by_key = self._slot_of
        check_names(self.files.folder, {p.key for p in pieces}, by_key.keys() & {p.key for p in pieces})
        for key in dict.fromkeys(p.key for p in pieces):
            whole = self._joined(by_key[key])
            for piece in (p for p in pieces if p.key == key):
                if tuple(whole.shape) != piece.global_shape:
                    raise InteropError(
                        f"{by_key[key].names[0]} makes {key} {list(whole.shape)}, the model has "
                        f"{list(piece.global_shape)}"
                    )
                piece.of(piece.parameter).copy_(piece.cut(whole))

    def _joined(self, slot: Slot, *, outline: bool = False) -> Tensor:
        """Ours from the stored parts; ``outline`` asks for shape and type alone (a tensor on the meta device)."""
        read = self.files.outline if outline else self.files.get
        parts = [read(self._stored_name(name)) for name in slot.names]
        whole = slot.join(parts)
        return resize_rows(whole, self.run.vocab_size) if slot.names == (EMBEDDING,) else whole

    def _stored_name(self, name: str) -> str:
        alias = HEAD_ALIAS + name.removeprefix(HEAD)
        return alias if name.startswith(HEAD) and name not in self.files.names else name

    def _check_names(self) -> None:
        names = {n for n in self.files.names if not n.startswith(AE_PREFIX)}
        if any(n.startswith(HEAD + "net.") for n in names):
            raise InteropError(
                f"{self.files.folder} holds a flow or diffusion head ({HEAD}net.*); only energy heads can be read"
            )
        twins = [(HEAD + n.removeprefix(HEAD_ALIAS), n) for n in names if n.startswith(HEAD_ALIAS)]
        for name, alias in twins:
            if name in names and not torch.equal(self.files.get(name), self.files.get(alias)):
                raise InteropError(f"{self.files.folder}: {alias} differs from {name}, of which it is a copy")
        wanted = {name for slot in self.slots for name in slot.names}
        check_names(self.files.folder, wanted, (names - {a for _, a in twins}) | {n for n, _ in twins})

    def _autoencoder_settings(
        self, folder: Path | None, given: dict[str, object] | None, raw: dict[str, object]
    ) -> dict[str, object]:
        if folder is not None:
            return settings.read(folder)
        if given is not None:
            settings.refuse_unbuildable(given, "autoencoder_config")
            return given
        raise InteropError(
            f"{self.files.folder}: its ae_path {raw.get('ae_path')!r} is a path on the machine it was trained on and "
            "is not followed; give the folder of its autoencoder"
        )

    def _load_autoencoder(self, folder: Path | None, raw: dict[str, object], stored: int) -> Autoencoder:
        """The one that is embedded or given; ``stored`` rows of the language model, which an embedded one may have."""
        config, objective, own, k = settings.autoencoder_sections(raw, folder)
        embedded = any(n.startswith(AE_PREFIX) for n in self.files.names)
        v = self.run.vocab_size
        inside = (
            published_autoencoder.build(config, objective, self.files, AE_PREFIX, v, k, {own, stored}).model
            if embedded
            else None
        )
        if folder is None:
            if inside is None:
                raise InteropError(
                    f"{self.files.folder} embeds no autoencoder ({AE_PREFIX}*); give its folder"
                )
            return inside
        outside = published_autoencoder.import_autoencoder(folder, v).model
        if inside is not None:
            unlike = same_weights(inside.state_dict(), outside.state_dict())
            if unlike:
                raise InteropError(
                    f"{self.files.folder} embeds another autoencoder than {folder}: {len(unlike)} tensors differ, "
                    f"first {unlike[0]}. The language model was trained with the embedded one"
                )
        return outside


def export_language_model(
    run: RunConfig,
    whole: Callable[[str], Tensor],
    autoencoder: Autoencoder,
    folder: Path,
    *,
    container: Container = "bin",
    vocab_size: int | None = None,
    ae_path: str = "",
    special_ids: Mapping[str, int | None] | None = None,
    stored: Stored | None = None,
    max_shard_bytes: int = 2 << 30,
) -> None:
    """Writes a language model in the published layout: all aliases, and the autoencoder under ``ae_model.``.

    Args:
        whole: our global key → its whole tensor (``whole_weights`` makes one from a world of one).
        vocab_size: rows to write; above V, zero rows are appended (128 257 for the published padding token).
        ae_path: what config.json should say.
        special_ids: what ``export_tokenizer`` returned.
        stored: the folder it was imported from, whose config.json (but for ``ae_path``), names and data types are
            given back.
    """
    rows = vocab_size or run.vocab_size
    slots = slots_of(run.require_lm())
    if stored is None:
        dtype = str(whole(slots[0].key).dtype).removeprefix("torch.")
        settings.write(settings.language_model_config(run, rows, ae_path, special_ids, dtype), folder)
    else:
        settings.write({**stored.config, "ae_path": ae_path}, folder)

    def groups() -> Iterator[list[tuple[str, Tensor]]]:
        yield from published_autoencoder.published_groups(autoencoder, AE_PREFIX, rows)
        for slot in slots:
            for name, tensor in zip(slot.names, slot.split(whole(slot.key)), strict=True):
                stored = resize_rows(tensor, rows) if name == EMBEDDING else tensor
                stored = stored.contiguous()
                alias = [HEAD_ALIAS + name.removeprefix(HEAD)] if name.startswith(HEAD) else []
                yield [(n, stored) for n in (name, *alias)]

    made = groups()
    write_weights(folder, made if stored is None else stored.as_stored(made), container, max_shard_bytes)


def whole_weights(models: Sequence[CalmModel]) -> Callable[[str], Tensor]:
    """Global key → whole tensor, from stages that hold every piece (TP 1, PP 1).

    Raises:
        InteropError: on use, for a key this rank holds only in part.
    """
    pieces = pieces_of(models)

    def whole(key: str) -> Tensor:
        mine = [p for p in pieces if p.key == key]
        held = sum(p.of(p.parameter).numel() for p in mine)
        if not mine or held != torch.Size(mine[0].global_shape).numel():
            raise InteropError(
                f"{key} is not whole on this rank: load the checkpoint at TP 1, PP 1 to export it"
            )
        if len(mine) == 1:
            return mine[0].of(mine[0].parameter).detach().cpu()
        out = torch.empty(mine[0].global_shape, dtype=mine[0].parameter.dtype)
        for piece in mine:
            piece.cut(out).copy_(piece.of(piece.parameter).detach())
        return out

    return whole


def write_checkpoint(published: PublishedLanguageModel, directory: Path) -> list[str]:
    """Writes the weights (no optimizer state) as a sharded checkpoint that every layout reads; returns its files.

    Needs an initialised process group of one rank. ``directory`` must exist and be empty.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    shards = []
    for key, shape, dtype in published.shapes():
        outline = torch.empty((), dtype=dtype).expand(shape)  # of that shape, without its memory
        shards.append(ShardedTensor.from_rank_offsets(MODEL_PREFIX + key, outline, replica_id=0))
    return write_shards(
        shards, {}, directory, make=lambda key: published.weight(key.removeprefix(MODEL_PREFIX))
    )


def whole_from_checkpoint(directory: Path) -> Callable[[str], Tensor]:
    """Global key → whole tensor, read from a checkpoint of any layout when asked for; no process group needed.

    Raises:
        InteropError: on use, for a key the checkpoint does not hold.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    stored_shapes(directory)  # looks through the index for foreign code before it is trusted
    reader = FileSystemReader(directory)
    metadata = reader.read_metadata().state_dict_metadata

    def whole(key: str) -> Tensor:
        found = metadata.get(MODEL_PREFIX + key)
        if not isinstance(found, TensorStorageMetadata):
            raise InteropError(f"{directory} holds no weight {key}: it is the checkpoint of another model")
        tensor = torch.empty(found.size, dtype=found.properties.dtype)
        load({MODEL_PREFIX + key: tensor}, storage_reader=reader, no_dist=True)
        return tensor

    return whole
