"""The model's layout and its export: strict, fingerprinted, free of code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from calm_scale.autoencoder import ExportCard, ExportError, read_card
from calm_scale.autoencoder.export import load_export, write_export
from calm_scale.autoencoder.model import Autoencoder
from calm_scale.config import ConfigError
from calm_scale.config.autoencoder import AutoencoderModelConfig, ObjectiveConfig

V, K = 17, 2
SIZES = AutoencoderModelConfig(hidden_size=8, ffn_size=12, latent_size=5, init_std=0.2)


@pytest.fixture
def model() -> Autoencoder:
    return Autoencoder(SIZES, V, K, seed=4)


def write(model: Autoencoder, directory: Path, **more: object) -> ExportCard:
    return write_export(
        directory,
        model.state_dict(),
        config=SIZES,
        objective=ObjectiveConfig(),
        vocab_size=V,
        patch_size=K,
        **more,  # type: ignore[arg-type]
    )


def test_the_28_names_and_shapes_are_the_published_ones() -> None:
    a, f, l, k, v = 8, 12, 5, K, V
    want = {"encoder.embed_tokens.weight": (v, a), "decoder.lm_head_weight": (v, a)}
    for side in ("encoder.encoder_layers", "decoder.decoder_layers"):
        for i in range(2):
            want[f"{side}.{i}.mlp.gate_proj.weight"] = (f, a)
            want[f"{side}.{i}.mlp.up_proj.weight"] = (f, a)
            want[f"{side}.{i}.mlp.down_proj.weight"] = (a, f)
            want[f"{side}.{i}.layernorm.weight"] = (a,)
    for name, (rows, columns) in {
        "encoder.squeeze_layer": (a, k * a),
        "encoder.hidden_to_latent": (2 * l, a),
        "decoder.latent_to_hidden": (a, l),
        "decoder.expand_layer": (k * a, a),
    }.items():
        want[f"{name}.weight"], want[f"{name}.bias"] = (rows, columns), (rows,)
    want["encoder.norm.weight"], want["decoder.norm.weight"] = (a,), (a,)
    have = {name: tuple(tensor.shape) for name, tensor in Autoencoder(SIZES, V, K).state_dict().items()}
    assert have == want and len(have) == 28


def test_the_paper_s_size_has_75_million_parameters() -> None:
    with torch.device("meta"):
        encoder_width = AutoencoderModelConfig()
    a, f, v, l, k = encoder_width.hidden_size, encoder_width.ffn_size, 128_256, 128, 4
    blocks = 4 * (3 * a * f + a)
    total = v * a + blocks + (k * a * a + a) + (2 * l * a + 2 * l) + (l * a + a) + (k * a * a + k * a) + 2 * a
    small = Autoencoder(AutoencoderModelConfig(), 16, k)
    assert sum(p.numel() for _, p in small.unique_parameters()) == total - (v - 16) * a
    assert total == 75_832_064 - a  # the published count has one row more: its pad token


def test_layers_before_and_after_the_squeeze(model: Autoencoder) -> None:
    """The first half of the encoder sees single tokens: shuffling a patch shuffles what enters the squeeze."""
    seen: list[torch.Tensor] = []
    model.encoder.squeeze_layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    model.encode(torch.tensor([[3, 7], [7, 3]]))
    first, second = seen[0].unflatten(-1, (K, -1))
    assert torch.equal(first[0], second[1]) and torch.equal(first[1], second[0])


def test_weights_depend_on_the_seed_alone(model: Autoencoder) -> None:
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    again, other = Autoencoder(SIZES, V, K, seed=4), Autoencoder(SIZES, V, K, seed=5)
    assert torch.equal(torch.random.get_rng_state(), before)
    for name, weight in again.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name])
    assert not torch.equal(again.encoder.token_embedding, other.encoder.token_embedding)


def test_export_round_trip_is_exact_and_tied_again(model: Autoencoder, tmp_path: Path) -> None:
    card = write(model, tmp_path, tokenizer_fingerprint="t", steps=7, metrics={"token_accuracy": 0.5})
    loaded, read = load_export(tmp_path)
    assert read == card and read.latent_size == 5 and read.steps == 7
    assert loaded.decoder.lm_head_weight is loaded.encoder.embed_tokens.weight
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name])
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["card.json", "model.safetensors"]


def test_the_fingerprint_is_of_the_weights(model: Autoencoder, tmp_path: Path) -> None:
    first = write(model, tmp_path / "a").fingerprint
    assert write(model, tmp_path / "b", steps=9).fingerprint == first
    with torch.no_grad():
        model.decoder.norm.weight[0] += 1e-6
    assert write(model, tmp_path / "c").fingerprint != first


def test_damaged_and_foreign_exports_are_refused(model: Autoencoder, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"card\.json is missing"):
        load_export(tmp_path)
    write(model, tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ExportError, match="not the same weights"):
        load_export(tmp_path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ExportError, match="cannot be read"):
        load_export(tmp_path)
    path.unlink()
    with pytest.raises(ExportError, match="cannot be read"):
        load_export(tmp_path)
    for text, said in (
        (
            "{}",
            r"card\.json: does not fit: fingerprint: missing; vocab_size: missing; .*; export one again: ",
        ),
        ("[1]", r"card\.json: is damaged: a JSON list, not an object; export one again: "),
        ('{"fingerprint": ', r"card\.json: is damaged, not JSON: .*; export one again: "),
    ):
        (tmp_path / "card.json").write_text(text)
        with pytest.raises(ConfigError, match=said) as refused:
            read_card(tmp_path)
        assert "\n" not in str(refused.value)


def test_missing_unknown_and_misshapen_weights_are_all_named(model: Autoencoder, tmp_path: Path) -> None:
    weights = dict(model.unique_parameters())
    weights["stranger"] = torch.nn.Parameter(torch.zeros(1))
    del weights["encoder.norm.weight"]
    weights["decoder.norm.weight"] = torch.nn.Parameter(torch.zeros(3))
    write_export(tmp_path, weights, config=SIZES, objective=ObjectiveConfig(), vocab_size=V, patch_size=K)
    with pytest.raises(ExportError) as refused:
        load_export(tmp_path)
    for part in ("missing encoder.norm.weight", "unknown stranger", "decoder.norm.weight is [3]"):
        assert part in str(refused.value)


def test_swapped_weights_do_not_pass_for_the_card_s(model: Autoencoder, tmp_path: Path) -> None:
    write(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["encoder.norm.weight"] = tensors["encoder.norm.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ExportError, match="fingerprint"):
        load_export(tmp_path)


def test_a_newer_format_is_refused(model: Autoencoder, tmp_path: Path) -> None:
    write(model, tmp_path)
    card = json.loads((tmp_path / "card.json").read_text())
    (tmp_path / "card.json").write_text(json.dumps(card | {"format_version": 2}))
    with pytest.raises(ExportError, match="format version 2"):
        read_card(tmp_path)
