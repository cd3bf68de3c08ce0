"""A published config.json: what is read from it, and that nothing which changes the function is passed over."""

from __future__ import annotations

import pytest

from calm_scale.interop import settings
from calm_scale.interop.files import InteropError

LM = {
    "patch_size": 2, "num_mlp_layers": 1, "num_samples": 4, "noise_size": 8, "latent_size": 6, "vocab_size": 11,
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 16,
}  # fmt: skip


def backbone(folder, **changed):
    settings.write({**LM, **changed}, folder)
    return settings.language_model_sections(settings.read(folder), folder)[0]


@pytest.mark.parametrize(
    "given",
    [
        {"rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 500_000.0}, "rope_theta": None},
        {"rope_parameters": {"rope_theta": 500_000.0, "rope_type": None}, "rope_theta": 500_000},
        {"rope_scaling": {"rope_theta": 500_000.0, "type": "default"}},
        {"rope_theta": 500_000.0, "rope_parameters": None},
    ],
)
def test_rope_theta_is_read_where_newer_files_have_it(tmp_path, given):
    assert backbone(tmp_path, **given).rope_theta == 500_000


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3"}},
            "rope_parameters.rope_type 'llama3'",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "factor": 8}},
            r"rope_parameters.factor 8 \(must be None",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters.full_attention"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor 0.5"),
        ({"rope_parameters": [1]}, r"rope_parameters \[1\] \(must be an object"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta 500000.0 .must agree"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            "rope_scaling.type 'linear'.*rope_scaling.factor",
        ),
        ({"head_dim": 8}, "head_dim 8 .must be hidden_size 16 / num_attention_heads 4"),
        ({"sliding_window": 512}, "sliding_window 512"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings True"),
        ({"logits_scaling": 8.0}, "logits_scaling 8.0"),
        ({"residual_multiplier": 0.22}, "residual_multiplier 0.22"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_what_would_be_another_function_is_refused_by_name(tmp_path, given, said):
    with pytest.raises(InteropError, match=rf"config.json describes a model .* cannot build: .*{said}"):
        backbone(tmp_path, **given)


def test_what_changes_nothing_is_taken(tmp_path):
    plain = backbone(tmp_path)
    same = {
        "head_dim": 4,
        "sliding_window": None,
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * 2,
    }
    assert backbone(tmp_path, **same, logit_scale=1.0, transformers_version="5.0", model_type="calm") == plain
    assert backbone(tmp_path, sliding_window=4096, use_sliding_window=False) == plain
    assert backbone(tmp_path, rms_norm_eps=1e-5).norm_eps == 1e-5


def test_an_error_names_the_model_in_good_english(tmp_path):
    settings.write({**LM, "num_encoder_layers": 3, "num_decoder_layers": 2}, tmp_path)
    with pytest.raises(InteropError, match="is not an autoencoder we can build"):
        settings.autoencoder_sections(settings.read(tmp_path), tmp_path)


@pytest.mark.parametrize("key", ["vocab_size", "patch_size"])
@pytest.mark.parametrize("value", [512.7, 10**12, 0, -3, True, "512", None, float("nan")])
def test_a_size_is_a_whole_number_that_ids_can_count(tmp_path, key, value):
    for read, sizes in (
        (settings.language_model_sections, LM),
        (settings.autoencoder_sections, {**LM, "num_encoder_layers": 2, "num_decoder_layers": 2}),
    ):
        settings.write({**sizes, key: value}, tmp_path)
        with pytest.raises(InteropError, match=f"{key} is .*, not a whole number from 1 to 2147483647"):
            read(settings.read(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("lm", "ae", "fits"), [(11, 11, True), (12, 11, True), (11, 12, True), (11, 13, False)]
)
def test_vocabularies_may_be_a_padding_row_apart(lm, ae, fits):
    language_model = {**LM, "vocab_size": lm}
    autoencoder = {**LM, "num_encoder_layers": 2, "num_decoder_layers": 2, "vocab_size": ae}
    assert settings.published_run(language_model, autoencoder, "x", vocab_size=10).vocab_size == 10
    if fits:
        assert settings.published_run(language_model, autoencoder, "x").vocab_size == lm
        return
    with pytest.raises(InteropError, match=r"vocab_size 11, the autoencoder 13: .*do not belong together"):
        settings.published_run(language_model, autoencoder, "x")
