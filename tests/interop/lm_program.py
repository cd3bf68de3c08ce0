"""Runs the language-model half of the interop tests in a process of its own: ``lm_program.py FOLDER``.

Megatron's stand-in for CUDA is process-wide, so it stays out of the test process. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.nn import functional as F

from calm_scale.config.autoencoder import AutoencoderModelConfig, ObjectiveConfig
from calm_scale.interop import settings
from calm_scale.interop.autoencoder import export_autoencoder
from calm_scale.interop.files import InteropError, WeightFiles, write_weights
from calm_scale.interop.language_model import (
    PublishedLanguageModel,
    export_language_model,
    whole_from_checkpoint,
    whole_weights,
    write_checkpoint,
)
from calm_scale.interop.origin import Origin, Stored
from calm_scale.lm.build import build_models
from calm_scale.lm.sharded import read_weights, write_shards
from calm_scale.runtime.megatron import initialize

EPS = 1e-5  # of the RMSNorms; the LayerNorms of compressor and head have 1e-6 whatever config.json says
L, D, FF, H, G, K, V, Z, NOISE, BLOCKS = 2, 16, 24, 4, 2, 2, 11, 6, 8, 1


def published_names():
    """The published tensors of a tiny model, written out from the layout's description."""
    head_dim = D // H
    shapes = {"transformer.embed_tokens.weight": (V, D), "transformer.norm.weight": (D,)}
    for i in range(L):
        at = f"transformer.layers.{i}."
        shapes |= {
            at + "self_attn.q_proj.weight": (D, D),
            at + "self_attn.k_proj.weight": (G * head_dim, D),
            at + "self_attn.v_proj.weight": (G * head_dim, D),
            at + "self_attn.o_proj.weight": (D, D),
            at + "mlp.gate_proj.weight": (FF, D),
            at + "mlp.up_proj.weight": (FF, D),
            at + "mlp.down_proj.weight": (D, FF),
            at + "input_layernorm.weight": (D,),
            at + "post_attention_layernorm.weight": (D,),
        }
    both = {"0": (2 * D, K * D), "2": (D, 2 * D), "3": (D,)}
    for number, shape in both.items():
        shapes |= {f"embed_proj.{number}.weight": shape, f"embed_proj.{number}.bias": shape[:1]}
    head = {"noise_embd": (D, NOISE), "hidden_embd": (D, D), "norm_hidden": (D,), "norm_noise": (D,)}
    for j in range(BLOCKS):
        at = f"mlp_blocks.{j}."
        head |= {at + "in_ln": (D,), at + "linears.0": (D, 2 * D), at + "linears.2": (D, D)}
        head |= {at + "linears.4": (2 * D, D), at + "down_proj": (D, D)}
    head |= {"final_layer.in_ln": (D,), "final_layer.linears.0": (D, D), "final_layer.linears.2": (Z, D)}
    for name, shape in head.items():
        shapes |= {f"generative_head.{name}.weight": shape, f"generative_head.{name}.bias": shape[:1]}
    return shapes


def rms(x, w):
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * w


def rotate(x):
    """Llama's rotary embedding in its rotate-half form, [b, h, P, d_h]."""
    half = x.shape[-1] // 2
    angle = torch.outer(torch.arange(x.shape[2]).float(), 10_000 ** (-torch.arange(half).float() / half))
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def plain_hidden(w, tokens):
    """The published backbone in a few lines of plain torch."""
    b = tokens.shape[0]
    x = F.embedding(tokens, w["transformer.embed_tokens.weight"]).view(b, -1, K * D)
    x = F.silu(F.linear(x, w["embed_proj.0.weight"], w["embed_proj.0.bias"]))
    x = F.linear(x, w["embed_proj.2.weight"], w["embed_proj.2.bias"])
    x = F.layer_norm(x, (D,), w["embed_proj.3.weight"], w["embed_proj.3.bias"], 1e-6)
    for i in range(L):
        at = f"transformer.layers.{i}."
        y = rms(x, w[at + "input_layernorm.weight"])
        q, k, v = (
            F.linear(y, w[at + f"self_attn.{n}_proj.weight"]).view(b, x.shape[1], -1, D // H).transpose(1, 2)
            for n in "qkv"
        )
        q, k = rotate(q), rotate(k)
        k, v = (t.repeat_interleave(H // G, dim=1) for t in (k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.linear(o, w[at + "self_attn.o_proj.weight"])
        y = rms(x, w[at + "post_attention_layernorm.weight"])
        gate, up = (F.linear(y, w[at + f"mlp.{n}_proj.weight"]) for n in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, w[at + "mlp.down_proj.weight"])
    return rms(x, w["transformer.norm.weight"])


def said(action):
    try:
        action()
    except InteropError as error:
        return str(error)
    return None


def main():
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    ae_config = AutoencoderModelConfig(latent_size=Z, hidden_size=8, ffn_size=12)
    from calm_scale.autoencoder.model import Autoencoder

    autoencoder = Autoencoder(ae_config, V, K, seed=3)
    export_autoencoder(autoencoder, ObjectiveConfig(), out / "ae")
    stored = {n: 0.3 * torch.randn(s, generator=generator) for n, s in published_names().items()}
    for kind in ("weight", "bias"):  # patches of little spread, where an epsilon counts
        stored[f"embed_proj.2.{kind}"] *= 0.02
    weights = dict(stored)
    weights |= {n.replace("generative_head", "mlp_generator"): t for n, t in stored.items() if "head" in n}
    weights |= {f"ae_model.{n}": t for n, t in WeightFilesDict(out / "ae").items()}
    config = {
        "ae_path": "/home/somebody/ae",
        "patch_size": K, "num_mlp_layers": BLOCKS, "num_samples": 4, "beta": 1.0, "noise_size": NOISE,
        "latent_size": Z, "vocab_size": V, "hidden_size": D, "intermediate_size": FF, "num_hidden_layers": L,
        "num_attention_heads": H, "num_key_value_heads": G, "max_position_embeddings": 16,
        "rope_theta": 10_000.0, "rms_norm_eps": EPS, "hidden_act": "silu",
    }  # fmt: skip
    settings.write(config, out / "theirs")
    write_weights(out / "theirs", [[item] for item in weights.items()], "bin", 1 << 30)

    layout = initialize_one()
    published = PublishedLanguageModel(out / "theirs", out / "ae")
    models = build_models(published.run, layout, "fp32")
    published.fill(models)
    tokens = torch.randint(V, (2, 5 * K), generator=generator)
    with torch.no_grad():
        hidden = models[0](tokens)
        apart = float((hidden - plain_hidden(stored, tokens)).abs().max())
    report = {"hidden_apart": apart, "num_slots": len(published.slots), "num_names": len(weights)}

    whole = whole_weights(models)
    for container in ("bin", "safetensors"):
        target = out / container
        export_language_model(
            published.run, whole, published.autoencoder, target, container=container, max_shard_bytes=4000
        )
        again = WeightFilesDict(target)
        report[f"{container}_same_names"] = again.keys() == weights.keys()
        report[f"{container}_same_bits"] = all(torch.equal(again[n], t) for n, t in weights.items())
        report[f"{container}_shards"] = len(list(target.glob(f"*.{container}")))
        other = build_models(published.run, layout, "fp32")
        PublishedLanguageModel(target, out / "ae").fill(other)
        same = zip(models[0].state_dict().items(), other[0].state_dict().values(), strict=True)
        report[f"{container}_round_trip"] = all(
            torch.equal(a, b) for (_, a), b in same if isinstance(a, torch.Tensor)
        )

    (out / "sharded").mkdir()
    write_checkpoint(published, out / "sharded")
    loaded = build_models(published.run.model_copy(update={"seed": 9}), layout, "fp32")
    read_weights(loaded, out / "sharded")
    report["sharded_same_model"] = all(
        torch.equal(a, b) for a, b in zip(models[0].parameters(), loaded[0].parameters(), strict=True)
    )
    export_language_model(
        published.run, whole_from_checkpoint(out / "sharded"), published.autoencoder, out / "back"
    )
    again = WeightFilesDict(out / "back")
    report["sharded_same_bits"] = all(torch.equal(again[n], t) for n, t in weights.items())
    report["sharded_unknown"] = said(lambda: whole_from_checkpoint(out / "sharded")("nothing"))

    stripped = PublishedLanguageModel(out / "theirs", out / "ae", vocab_size=V - 1)
    narrow = build_models(stripped.run, layout, "fp32")
    stripped.fill(narrow)
    report["stripped_rows"] = dict(narrow[0].named_parameters())[
        "compressor.tokens.embedding.table.weight"
    ].shape[0]
    export_language_model(
        stripped.run, whole_weights(narrow), stripped.autoencoder, out / "padded", vocab_size=V
    )
    padded = WeightFilesDict(out / "padded")["transformer.embed_tokens.weight"]
    table = stored["transformer.embed_tokens.weight"]
    report["padded_row_is_zero"] = bool((padded[-1] == 0).all()) and torch.equal(padded[:-1], table[:-1])

    def variant(name, changed, **settled):
        settings.write({**config, **settled}, out / name)
        write_weights(out / name, [[item] for item in changed.items()], "bin", 1 << 30)
        return said(lambda: PublishedLanguageModel(out / name, out / "ae"))

    only_one = {n: t for n, t in weights.items() if "generative_head" not in n}
    report["one_alias"] = variant("one_alias", only_one)
    lacking = {n: t for n, t in weights.items() if "layers.1.mlp.up" not in n}
    report["missing"] = variant("missing", lacking)
    report["unexpected"] = variant("unexpected", {**weights, "transformer.extra.weight": torch.zeros(1)})
    report["other_alias"] = variant(
        "other_alias", {**weights, "mlp_generator.noise_embd.bias": torch.ones(D)}
    )
    query = "transformer.layers.1.self_attn.q_proj.weight"
    report["misshapen"] = variant("misshapen", {**weights, query: weights[query][:-1]})
    tables = {"cut": table[:7], "empty": table[:0], "doubled": torch.cat([table, table])}
    report["tables"] = [
        variant(name, {**weights, "transformer.embed_tokens.weight": other}) for name, other in tables.items()
    ]
    report["larger_config"] = variant("larger_config", weights, vocab_size=V + 1)
    report["many_blocks"] = variant("many_blocks", weights, num_mlp_layers=10**9)
    report["wide_noise"] = variant("wide_noise", weights, noise_size=10**18)
    report["full_disk"] = full_disk(out)
    report["flow"] = variant("flow", {**weights, "generative_head.net.x": torch.ones(1)})
    report["other_ae"] = variant(
        "other_ae", {**weights, "ae_model.encoder.norm.weight": torch.full((8,), 2.0)}
    )
    report["no_ae"] = said(lambda: PublishedLanguageModel(out / "theirs"))
    embedded = PublishedLanguageModel(out / "theirs", autoencoder_config=settings.read(out / "ae"))
    gelu = {**settings.read(out / "ae"), "hidden_act": "gelu"}
    report["given_settings"] = said(lambda: PublishedLanguageModel(out / "theirs", autoencoder_config=gelu))
    report["embedded"] = all(
        torch.equal(a, b)
        for a, b in zip(embedded.autoencoder.parameters(), autoencoder.parameters(), strict=True)
    )
    report |= given_back(out, config, weights)
    print(json.dumps(report))


def given_back(out, config, weights):
    """A folder of mixed data types with one head alias, imported into shards and exported again."""
    told = {"bos_token_id": 3, "eos_token_id": 4, "pad_token_id": None, "torch_dtype": "bfloat16"}
    settings.write({**config, **told, "transformers_version": "4.43.0"}, out / "mixed")
    settings.write({**settings.read(out / "ae"), **told}, out / "mixed_ae")
    autoencoder = {n: t.bfloat16() for n, t in WeightFilesDict(out / "ae").items()}
    write_weights(out / "mixed_ae", [[item] for item in autoencoder.items()], "bin", 1 << 30)
    mixed = {n: t for n, t in weights.items() if "mlp_generator" not in n and "ae_model" not in n}
    mixed = {n: t if "layernorm" in n or "k_proj" in n else t.bfloat16() for n, t in mixed.items()}
    mixed |= {f"ae_model.{n}": t for n, t in autoencoder.items()}
    write_weights(out / "mixed", [[item] for item in mixed.items()], "bin", 1 << 30)
    published = PublishedLanguageModel(out / "mixed", out / "mixed_ae")
    (out / "mixed_shards").mkdir()
    write_checkpoint(published, out / "mixed_shards")
    (out / "run").mkdir()
    Origin(language_model=Stored.of(out / "mixed"), autoencoder=Stored.of(out / "mixed_ae")).write(
        out / "run"
    )
    origin = Origin.read(out / "run")
    export_autoencoder(published.autoencoder, ObjectiveConfig(), out / "again_ae", stored=origin.autoencoder)
    export_language_model(
        published.run, whole_from_checkpoint(out / "mixed_shards"), published.autoencoder, out / "again",
        ae_path="here", stored=origin.language_model,
    )  # fmt: skip
    same = {}
    for name, tensors in (("mixed", mixed), ("mixed_ae", autoencoder)):
        again = WeightFilesDict(out / name.replace("mixed", "again"))
        same[f"{name}_names"] = again.keys() == tensors.keys()
        same[f"{name}_bits"] = all(
            again[n].dtype == t.dtype and torch.equal(again[n], t) for n, t in tensors.items()
        )
        keys = settings.read(out / name.replace("mixed", "again"))
        same[f"{name}_config"] = {**keys, "ae_path": 0} == {**settings.read(out / name), "ae_path": 0}
    return {"given_back": same, "new_ae_path": settings.read(out / "again")["ae_path"]}


def full_disk(out):
    """What a write says that finds no room."""

    def make(key):
        raise OSError(28, "No space left on device")

    shard = ShardedTensor.from_rank_offsets("model.x", torch.zeros(1), replica_id=0)
    (out / "full").mkdir()
    try:
        write_shards([shard], {}, out / "full", make=make)
    except OSError as error:
        return error.errno
    return None


class WeightFilesDict(dict):
    def __init__(self, folder):
        files = WeightFiles(folder)
        super().__init__({name: files.get(name) for name in files.names})


def initialize_one():
    from calm_scale.config.lm import ParallelConfig

    return initialize(ParallelConfig(), SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu")))


if __name__ == "__main__":
    main()
