"""What a published config.json may ask for beyond sizes: everything here has one value that our models compute.

A key that is absent is at the value we compute. One at any other value changes the function that the weights were
trained as, so the folder is refused; keys that change nothing (names, dates, data types) are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
