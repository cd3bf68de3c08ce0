"""The published config.json, read into our sections and written from them.

The published files carry no ``model_type`` and an ``ae_path`` of the machine they were trained on; neither is
needed here. A setting our models cannot express is an error that names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from calm_scale.config.autoencoder import AutoencoderModelConfig, ObjectiveConfig
from calm_scale.config.evaluation import GenerationConfig
from calm_scale.config.files import checked, findings, read_object
from calm_scale.config.lm import BackboneConfig
from calm_scale.config.run import RunConfig
from calm_scale.interop.files import InteropError
from calm_scale.lm.heads.energy import EnergyHeadConfig

ROPE_THETA = 10_000.0
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "attention_bias": (False,),
    "attention_dropout": (0.0,),
    "pretraining_tp": (1,),
    "tie_word_embeddings": (False,),
}
"""Keys of the published files, and the values that we compute."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_multiplier": (),  # scores are scaled by head_dim^-0.5
    "attention_out_bias": (False,),
    "attn_logit_softcapping": (),
    "attn_temperature_tuning": (False,),
    "attention_chunk_size": (),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "is_causal": (True,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "no_rope_layers": (),
    "partial_rotary_factor": (1,),
    "qk_norm": (False,),
    "qkv_bias": (False,),
    "quantization_config": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_interleave": (False,),
    "scale_depth": (),
    "scale_emb": (1,),
    "use_bias": (False,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
}
"""Keys of other Llama-style models that change the function, and the values that do not; null never does."""

_ROPE_TYPES = ("default", None)


def unbuildable(raw: Mapping[str, Any]) -> list[str]:
    """What a config.json asks for that no model here computes: ``key value (must be …)`` each."""
    found = [_must(k, raw[k], v) for k, v in _FIXED.items() if k in raw and raw[k] not in v]
    found += [
        _must(k, raw[k], (*v, None))
        for k, v in _NEUTRAL.items()
        if raw.get(k) is not None and raw[k] not in v
    ]
    return [*found, *_head_width(raw), *_window(raw), *_rope(raw)]


def rope_theta(raw: Mapping[str, Any]) -> Any:
    """θ of ``rope_theta`` or, as newer files have it, of ``rope_parameters``."""
    return next(iter(_thetas(raw).values()), raw.get("rope_theta", ROPE_THETA))


def _must(key: str, value: Any, allowed: tuple[Any, ...]) -> str:
    return f"{key} {value!r} (must be {' or '.join(map(repr, allowed))})"


def _head_width(raw: Mapping[str, Any]) -> Iterator[str]:
    """``head_dim`` may stand there, and then is d / h."""
    width, size, heads = (raw.get(k) for k in ("head_dim", "hidden_size", "num_attention_heads"))
    if width is None or not isinstance(size, int) or not isinstance(heads, int) or heads < 1:
        return
    if not isinstance(width, int) or width * heads != size:
        yield f"head_dim {width!r} (must be hidden_size {size} / num_attention_heads {heads})"


def _window(raw: Mapping[str, Any]) -> Iterator[str]:
    """Attention over all earlier positions, in every layer."""
    if raw.get("use_sliding_window", True) and raw.get("sliding_window") is not None:
        yield _must("sliding_window", raw["sliding_window"], (None,))
    kinds = raw.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(k != "full_attention" for k in kinds)):
        yield f"layer_types {kinds!r} (must be 'full_attention' throughout)"


def _rope(raw: Mapping[str, Any]) -> Iterator[str]:
    """Rotary embedding without scaling, over the whole head, of one θ."""
    for key in ("rope_scaling", "rope_parameters"):
        yield from _one_rope(key, raw.get(key))
    thetas = _thetas(raw)
    if any(value != rope_theta(raw) for value in thetas.values()):
        yield " and ".join(f"{key} {value!r}" for key, value in thetas.items()) + " (must agree)"


def _one_rope(key: str, value: Any) -> Iterator[str]:
    if value is None:
        return
    if not isinstance(value, dict):
        yield f"{key} {value!r} (must be an object or null)"
        return
    for name, inner in value.items():
        if name in ("rope_type", "type"):
            allowed: tuple[Any, ...] = _ROPE_TYPES
        elif name == "partial_rotary_factor":
            allowed = (1, None)
        else:
            allowed = (inner,) if name == "rope_theta" else (None,)
        if inner not in allowed:
            yield _must(f"{key}.{name}", inner, allowed)


def _thetas(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Every θ that is given, by its key."""
    places = {"rope_theta": raw.get("rope_theta")}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(inner := raw.get(key), dict):
            places[f"{key}.rope_theta"] = inner.get("rope_theta")
    return {key: value for key, value in places.items() if value is not None}


CONFIG_FILE = "config.json"
_PADDING_ROWS = 1
_IDS_END = 2**31
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        InteropError: missing, not JSON, or asks for something our models do not have.
    """
    path = folder / CONFIG_FILE
    raw = read_object(path, remedy="a published folder has one", raises=InteropError)
    refuse_unbuildable(raw, path)
    return raw


def refuse_unbuildable(raw: Mapping[str, Any], where: object) -> None:
    """Raises InteropError for settings that ask for something our models do not have; ``where`` says whose."""
    if wrong := unbuildable(raw):
        raise InteropError(f"{where} describes a model this release cannot build: " + ", ".join(wrong))


def autoencoder_sections(
    raw: dict[str, Any], folder: Path | None = None
) -> tuple[AutoencoderModelConfig, ObjectiveConfig, int, int]:
    """(model, objective, V, K) of a published autoencoder config; ``folder`` is named where it does not fit."""
    with _explained("autoencoder", folder):
        dropout = raw.get("ae_dropout", 0.15)
        model = AutoencoderModelConfig(
            latent_size=raw["latent_size"],
            hidden_size=raw["hidden_size"],
            ffn_size=raw["intermediate_size"],
            encoder_layers=raw["num_encoder_layers"],
            decoder_layers=raw["num_decoder_layers"],
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            init_std=raw.get("initializer_range", 0.02),
        )
        objective = ObjectiveConfig(
            kl_weight=raw.get("kl_weight", 1e-3),
            kl_floor=raw.get("kl_clamp", 0.5),
            token_dropout=dropout,
            latent_dropout=dropout,
        )
        return model, objective, _count(raw, "vocab_size"), _count(raw, "patch_size")


def autoencoder_config(
    model: AutoencoderModelConfig,
    objective: ObjectiveConfig,
    vocab_size: int,
    patch_size: int,
    special_ids: Mapping[str, int | None] | None = None,
) -> dict[str, Any]:
    """config.json of an autoencoder; ``special_ids`` are those of its tokenizer."""
    return {
        "architectures": ["Autoencoder"],
        "ae_dropout": objective.token_dropout,
        "kl_clamp": objective.kl_floor,
        "kl_weight": objective.kl_weight,
        "patch_size": patch_size,
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_encoder_layers": model.encoder_layers,
        "num_decoder_layers": model.decoder_layers,
        "latent_size": model.latent(patch_size),
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "initializer_range": model.init_std,
        "rms_norm_eps": model.norm_eps,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        **_special_ids(special_ids, vocab_size),
        "torch_dtype": "float32",
    }


def language_model_sections(
    raw: dict[str, Any], folder: Path | None = None
) -> tuple[BackboneConfig, EnergyHeadConfig, int, int, int]:
    """(backbone, head, V, K, l) of a published language-model config; ``folder`` as above."""
    with _explained("language model", folder):
        backbone = BackboneConfig(
            num_layers=raw["num_hidden_layers"],
            hidden_size=raw["hidden_size"],
            ffn_size=raw["intermediate_size"],
            num_heads=raw["num_attention_heads"],
            num_query_groups=raw.get("num_key_value_heads"),
            positions=raw.get("max_position_embeddings", 2048),
            rope_theta=rope_theta(raw),
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            init_std=raw.get("initializer_range", 0.02),
        )
        head = EnergyHeadConfig(
            num_blocks=raw["num_mlp_layers"],
            noise_size=raw.get("noise_size", 64),
            num_samples=raw.get("num_samples", 8),
            alpha=raw.get("beta", 1.0),
        )
        v, k, l = (_count(raw, key) for key in ("vocab_size", "patch_size", "latent_size"))
        return backbone, head, v, k, l


def language_model_config(
    run: RunConfig,
    vocab_size: int,
    ae_path: str,
    special_ids: Mapping[str, int | None] | None = None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """config.json of a CALM with an energy head; ``special_ids`` are those of its tokenizer, ``dtype`` the weights'."""
    if run.lm is None or not isinstance(run.lm.head, EnergyHeadConfig):
        kind = None if run.lm is None else run.lm.head.kind
        raise InteropError(f"the published layout is known for the energy head only, this run has {kind}")
    backbone, head = run.lm.backbone, run.lm.head
    return {
        "architectures": ["EnergyTransformer"],
        "ae_path": ae_path,
        "patch_size": run.patch_size,
        "num_mlp_layers": run.lm.num_blocks,
        "num_samples": head.num_samples,
        "beta": head.alpha,
        "noise_size": head.noise_size,
        "latent_size": run.latent_size,
        "vocab_size": vocab_size,
        "hidden_size": backbone.hidden_size,
        "intermediate_size": backbone.ffn_size,
        "num_hidden_layers": backbone.num_layers,
        "num_attention_heads": backbone.num_heads,
        "num_key_value_heads": backbone.query_groups,
        "max_position_embeddings": backbone.positions,
        "rope_theta": backbone.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": backbone.init_std,
        "rms_norm_eps": backbone.norm_eps,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        "use_cache": True,
        **_special_ids(special_ids, vocab_size),
        "torch_dtype": dtype,
    }


def published_run(
    lm: dict[str, Any],
    autoencoder: dict[str, Any],
    name: str,
    vocab_size: int | None = None,
    folders: tuple[Path | None, Path | None] = (None, None),
    **fields: Any,
) -> RunConfig:
    """A run that describes a published language model and its autoencoder; ``fields`` override top-level keys.

    ``vocab_size`` below the published 128 257 leaves the padding row out; where none is asked for, the vocabularies of
    the two may differ by that row and no more. ``folders`` of language model and autoencoder are named where a file
    does not fit.
    """
    backbone, head, stored, k, l = language_model_sections(lm, folders[0])
    model, objective, ae_stored, ae_k = autoencoder_sections(autoencoder, folders[1])
    if (k, l) != (ae_k, model.latent(ae_k)):
        raise InteropError(
            f"the language model has K {k} and l {l}, the autoencoder K {ae_k} and l {model.latent(ae_k)}: "
            "they do not belong together"
        )
    if vocab_size is None and abs(stored - ae_stored) > _PADDING_ROWS:
        raise InteropError(
            f"the language model has vocab_size {stored}, the autoencoder {ae_stored}: that is more than a padding row "
            "apart, they do not belong together"
        )
    training = {"steps": 1, "global_batch": 1}
    document = {
        "name": name,
        "vocab_size": vocab_size or stored,
        "patch_size": k,
        "autoencoder": {"model": model, "objective": objective, "training": training},
        "lm": {"backbone": backbone, "head": head, "training": training},
        "generation": {"max_new_tokens": _new_tokens(backbone.positions * k)},
        **fields,
    }
    return checked(RunConfig, document, _place(folders[0]), raises=InteropError)


def _new_tokens(context: int) -> int:
    """The usual number of new tokens, or half of a short context: the other half is for the prompt."""
    return max(1, min(GenerationConfig().max_new_tokens, context // 2))


def stored_vocab_size(raw: Mapping[str, Any]) -> int:
    """V of a config.json, which is the number of rows of the embedding beside it."""
    return _count(raw, "vocab_size")


def _count(raw: Mapping[str, Any], key: str) -> int:
    """A whole number above 0; ids are below 2^31."""
    value = raw[key]
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or value != value // 1
        or not 0 < value < _IDS_END
    ):
        raise ValueError(f"{key} is {value!r}, not a whole number from 1 to {_IDS_END - 1}")
    return int(value)


def _place(folder: Path | None) -> object:
    return CONFIG_FILE if folder is None else folder / CONFIG_FILE


def _special_ids(ids: Mapping[str, int | None] | None, vocab_size: int) -> dict[str, int | None]:
    """None for one that is unknown, or that the vocabulary does not hold: readers take it for an embedding's row."""
    known = ids or {}
    found = {name: known.get(name) for name in SPECIAL_IDS}
    return {
        name: None if number is None or number >= vocab_size else number for name, number in found.items()
    }


def write(config: dict[str, Any], folder: Path) -> None:
    """config.json into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class _explained:  # noqa: N801 - reads as a word in `with _explained(...)`
    def __init__(self, what: str, folder: Path | None) -> None:
        self.what, self.where = what, _place(folder)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, KeyError):
            raise InteropError(f"{self.where} lacks {error} of a published {self.what}") from None
        if isinstance(error, TypeError | ValueError):
            why = findings(error) if isinstance(error, ValidationError) else str(error)
            article = "an" if self.what[0] in "aeiou" else "a"
            raise InteropError(f"{self.where} is not {article} {self.what} we can build: {why}") from None
