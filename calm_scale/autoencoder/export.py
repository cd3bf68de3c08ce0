"""The finished autoencoder as two files: ``model.safetensors`` and ``card.json``. Nothing that is read runs code.

The weights keep the published names; the tied output weight is left out and tied again on loading. The card's
fingerprint covers every weight and the model's shape, so a language model can name exactly the autoencoder it was
trained against.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from calm_scale.autoencoder import CARD_FILE, EXPORT_AGAIN, ExportCard, ExportError, read_card
from calm_scale.autoencoder.model import TIED_ALIAS, Autoencoder
from calm_scale.config.autoencoder import AutoencoderModelConfig, ObjectiveConfig
from calm_scale.config.errors import CalmScaleError

MODEL_FILE = "model.safetensors"


def fingerprint(weights: Mapping[str, torch.Tensor], config: AutoencoderModelConfig) -> str:
    """SHA-256 (hex) over the model's settings and every weight's name, shape, dtype and bytes, in name order."""
    digest = hashlib.sha256(json.dumps(config.model_dump(mode="json"), sort_keys=True).encode())
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_export(
    directory: Path,
    weights: Mapping[str, torch.Tensor],
    *,
    config: AutoencoderModelConfig,
    objective: ObjectiveConfig,
    vocab_size: int,
    patch_size: int,
    tokenizer_fingerprint: str | None = None,
    data_fingerprint: str | None = None,
    steps: int = 0,
    consumed_samples: int = 0,
    consumed_tokens: int = 0,
    metrics: Mapping[str, float] | None = None,
) -> ExportCard:
    """Write ``weights`` (full tensors by published name, the tied alias not needed) and their card.

    Both files are written beside their final names and renamed, the card last: a folder with a card is complete.

    Raises:
        CalmScaleError: the weights cannot be written.
    """
    tensors = {n: t.detach().cpu().contiguous() for n, t in weights.items() if n != TIED_ALIAS}
    card = ExportCard(
        fingerprint=fingerprint(tensors, config),
        vocab_size=vocab_size,
        patch_size=patch_size,
        latent_size=config.latent(patch_size),
        model=config,
        objective=objective,
        tokenizer_fingerprint=tokenizer_fingerprint,
        data_fingerprint=data_fingerprint,
        steps=steps,
        consumed_samples=consumed_samples,
        consumed_tokens=consumed_tokens,
        metrics=dict(metrics or {}),
    )
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CARD_FILE).unlink(missing_ok=True)
    partial = directory / (MODEL_FILE + ".tmp")
    save_weights(tensors, partial, {"fingerprint": card.fingerprint})
    _commit(partial, directory / MODEL_FILE)
    partial = directory / (CARD_FILE + ".tmp")
    partial.write_text(card.model_dump_json(indent=2) + "\n", encoding="utf-8")
    _commit(partial, directory / CARD_FILE)
    return card


def save_weights(
    tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """A safetensors file that whoever may read the files beside it may read too: safetensors itself makes it 0600.

    Raises:
        CalmScaleError: it cannot be written.
    """
    try:
        mode = _mode_of_a_new_file(path)
        save_file(tensors, path, metadata=metadata)
        path.chmod(mode)
    except (SafetensorError, OSError) as error:
        raise CalmScaleError(f"{path} cannot be written: {error}") from error


def _mode_of_a_new_file(path: Path) -> int:
    """The permissions that umask and folder give, found out on a file: the umask alone is read by changing it."""
    probe = path.with_name(f".{path.name}.{os.getpid()}.mode")
    try:
        probe.touch()
        return stat.S_IMODE(probe.stat().st_mode)
    finally:
        probe.unlink(missing_ok=True)


def load_export(directory: Path, *, device: torch.device | str = "cpu") -> tuple[Autoencoder, ExportCard]:
    """The frozen autoencoder of an export, in evaluation mode, no gradients, output weight tied again.

    Raises:
        ExportError: a file is missing or damaged, a weight is missing, unknown or misshapen, or the weights are
            not those the card names.
    """
    card = read_card(directory)
    path = directory / MODEL_FILE
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ExportError(f"{path} cannot be read: {error}; {EXPORT_AGAIN}") from error
    found = fingerprint(weights, card.model)
    if found != card.fingerprint:
        raise ExportError(
            f"{path} has fingerprint {found}, its card says {card.fingerprint}: not the same weights; "
            f"{EXPORT_AGAIN}"
        )
    model = Autoencoder(card.model, card.vocab_size, card.patch_size)
    load_weights(model, weights, str(path))
    return model.to(device).eval().requires_grad_(False), card


def load_weights(model: Autoencoder, weights: Mapping[str, torch.Tensor], origin: str) -> None:
    """Copy ``weights`` into the model, strictly: every name and shape must fit (the tied alias may be absent).

    Raises:
        ExportError: names every missing, unknown or misshapen weight.
    """
    targets = dict(model.unique_parameters())
    given = {name: tensor for name, tensor in weights.items() if name != TIED_ALIAS}
    problems = [f"missing {name}" for name in sorted(targets.keys() - given.keys())]
    problems += [f"unknown {name}" for name in sorted(given.keys() - targets.keys())]
    for name in sorted(targets.keys() & given.keys()):
        if targets[name].shape != given[name].shape:
            problems.append(f"{name} is {list(given[name].shape)}, the model has {list(targets[name].shape)}")
    if problems:
        raise ExportError(f"{origin} does not fit the model: " + "; ".join(problems))
    with torch.no_grad():
        for name, parameter in targets.items():
            parameter.copy_(given[name])
    model.retie()


def _commit(partial: Path, final: Path) -> None:
    """Flush to disk, then take the final name."""
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(final)
