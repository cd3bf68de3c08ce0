"""The published autoencoder layout, its containers, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import stat

import pytest
import torch

from calm_scale.autoencoder.export import write_export
from calm_scale.autoencoder.model import TIED_ALIAS, Autoencoder
from calm_scale.config import CalmScaleError, ConfigError
from calm_scale.config.autoencoder import AutoencoderModelConfig, ObjectiveConfig
from calm_scale.interop import settings
from calm_scale.interop.autoencoder import EMBEDDING, export_autoencoder, import_autoencoder
from calm_scale.interop.files import InteropError, WeightFiles, write_weights

V, K = 23, 4
CONFIG = AutoencoderModelConfig(latent_size=6, hidden_size=8, ffn_size=12)
OBJECTIVE = ObjectiveConfig(kl_weight=0.002, kl_floor=0.25, token_dropout=0.1, latent_dropout=0.1)


@pytest.fixture
def model():
    return Autoencoder(CONFIG, V, K, seed=1)


def stored(folder):
    files = WeightFiles(folder)
    return {name: files.get(name) for name in files.names}


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("container", ["bin", "safetensors"])
@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 2000])
def test_round_trip_is_bit_equal(model, tmp_path, container, max_shard_bytes):
    export_autoencoder(model, OBJECTIVE, tmp_path, container=container, max_shard_bytes=max_shard_bytes)
    assert len(WeightFiles(tmp_path).names) == 28
    index = list(tmp_path.glob("*.index.json"))
    assert bool(index) == (max_shard_bytes == 2000)
    found = import_autoencoder(tmp_path)
    assert same(found.model, model)
    assert found.model.decoder.lm_head_weight is found.model.encoder.embed_tokens.weight
    assert (found.model.config, found.objective, found.stored_vocab_size) == (CONFIG, OBJECTIVE, V)
    tokens = torch.arange(K)[None]
    assert torch.equal(found.model.encode(tokens)[0], model.encode(tokens)[0])


def test_bin_keeps_the_tie_as_one_storage(model, tmp_path):
    export_autoencoder(model, OBJECTIVE, tmp_path)
    raw = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert raw[TIED_ALIAS].data_ptr() == raw[EMBEDDING].data_ptr()


def test_missing_tied_weight_is_tied_again(model, tmp_path):
    export_autoencoder(model, OBJECTIVE, tmp_path)
    kept = {n: t for n, t in stored(tmp_path).items() if n != TIED_ALIAS}
    write_weights(tmp_path, [list(kept.items())], "bin", 1 << 30)
    assert same(import_autoencoder(tmp_path).model, model)


def test_untied_weight_is_refused(model, tmp_path):
    export_autoencoder(model, OBJECTIVE, tmp_path)
    changed = {**stored(tmp_path), TIED_ALIAS: torch.zeros(V, 8)}
    write_weights(tmp_path, [list(changed.items())], "bin", 1 << 30)
    with pytest.raises(InteropError, match="ties them"):
        import_autoencoder(tmp_path)


def test_vocabulary_is_cut_and_padded(model, tmp_path):
    export_autoencoder(model, OBJECTIVE, tmp_path, vocab_size=V + 1)
    assert settings.read(tmp_path)["vocab_size"] == V + 1
    assert (stored(tmp_path)[TIED_ALIAS][V] == 0).all()
    assert import_autoencoder(tmp_path).model.vocab_size == V + 1
    assert same(import_autoencoder(tmp_path, vocab_size=V).model, model)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (EMBEDDING, (V - 3, 8)),
        (EMBEDDING, (V + 1, 8)),
        (EMBEDDING, (0, 8)),
        (EMBEDDING, (V, 7)),
        (EMBEDDING, ()),
        ("encoder.norm.weight", (9,)),
    ],
)
@pytest.mark.parametrize("asked", [None, V - 1, V + 2])
def test_weights_that_contradict_their_config_are_refused(model, tmp_path, name, shape, asked):
    """Cutting and padding are for a vocabulary that was asked for, not for a table that lost its rows."""
    export_autoencoder(model, OBJECTIVE, tmp_path)
    changed = {**stored(tmp_path), name: torch.zeros(shape)}
    del changed[TIED_ALIAS]
    write_weights(tmp_path, [[item] for item in changed.items()], "bin", 1 << 30)
    with pytest.raises(InteropError, match=rf"{name} is \[.*\], its config.json makes it \["):
        import_autoencoder(tmp_path, asked)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"vocab_size": 2**31 - 1}, r"its config.json makes it \[2147483647, 8\]"),
        ({"hidden_size": 10**12}, "no memory could hold|makes it"),
        ({"hidden_size": 10**30}, r"hidden_size: should be less than 9223372036854775808"),
        ({"num_encoder_layers": 10**9}, r"1,000,000,002 layers, its weights are 28 tensors"),
    ],
)
def test_sizes_that_no_memory_holds_are_refused_before_it_is_asked_for(model, tmp_path, changed, said):
    export_autoencoder(model, OBJECTIVE, tmp_path)
    settings.write({**settings.read(tmp_path), **changed}, tmp_path)
    with pytest.raises(InteropError, match=said):
        import_autoencoder(tmp_path)


def test_missing_and_unexpected_names_are_listed(model, tmp_path):
    export_autoencoder(model, OBJECTIVE, tmp_path)
    changed = {**stored(tmp_path), "encoder.extra": torch.zeros(1)}
    del changed["decoder.norm.weight"]
    write_weights(tmp_path, [list(changed.items())], "bin", 1 << 30)
    with pytest.raises(
        InteropError, match=r"missing \(1\): decoder.norm.weight; unexpected \(1\): encoder.extra"
    ):
        import_autoencoder(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda t: t.index_fill(0, torch.tensor([1]), float("nan")), "is not finite in 1 of 8 elements"),
        (lambda t: t.long(), "is int64; a weight is one of"),
        (lambda t: t > 0, "is bool; a weight is one of"),
    ],
)
def test_what_is_no_weight_is_neither_read_nor_written(model, tmp_path, spoil, said):
    export_autoencoder(model, OBJECTIVE, tmp_path)
    weights = stored(tmp_path)
    weights["encoder.norm.weight"] = spoil(weights["encoder.norm.weight"])
    torch.save(weights, tmp_path / "spoilt")
    (tmp_path / "spoilt").replace(tmp_path / "pytorch_model.bin")
    with pytest.raises(InteropError, match=f"encoder.norm.weight {said}"):
        import_autoencoder(tmp_path)
    with pytest.raises(InteropError, match=f"encoder.norm.weight {said}"):
        write_weights(tmp_path / "out", [[item] for item in weights.items()], "safetensors", 1 << 30)


def test_a_file_that_cannot_be_written_is_no_mistake_of_the_user(tmp_path):
    (tmp_path / "model.part0.tmp").mkdir()
    with pytest.raises(CalmScaleError, match="cannot be written") as failed:
        write_weights(tmp_path, [[("x", torch.zeros(1))]], "safetensors", 1 << 30)
    assert not isinstance(failed.value, ConfigError)


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_weight_files_have_the_permissions_of_the_files_beside_them(model, tmp_path, umask):
    before = os.umask(umask)
    try:
        export_autoencoder(model, OBJECTIVE, tmp_path / "published", container="safetensors")
        weights = dict(model.unique_parameters())
        write_export(
            tmp_path / "export", weights, config=CONFIG, objective=OBJECTIVE, vocab_size=V, patch_size=K
        )
    finally:
        os.umask(before)
    for folder in ("published", "export"):
        files = list((tmp_path / folder).iterdir())
        assert len(files) == 2
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o666 & ~umask}


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ([torch.zeros(1)], "holds a list, not tensors by name"),
        (torch.zeros(1), "holds a Tensor, not tensors by name"),
        ({3: torch.zeros(1)}, "holds a dict, not tensors by name"),
        (
            {"encoder.norm.weight": torch.ones(8).to_sparse()},
            "encoder.norm.weight is sparse_coo; a weight is a dense",
        ),
        ({"encoder.norm.weight": torch.ones(8, device="meta")}, "encoder.norm.weight is on the meta device"),
        ({"encoder.norm.weight": "8"}, "encoder.norm.weight is a str, not a tensor"),
    ],
)
def test_a_bin_file_that_holds_no_weights_is_refused(model, tmp_path, held, said):
    export_autoencoder(model, OBJECTIVE, tmp_path)
    path = tmp_path / "pytorch_model.bin"
    if isinstance(held, dict):
        held = {**torch.load(path, weights_only=True), **held}
    path.unlink()
    torch.save(held, path)
    with pytest.raises(InteropError, match=said):
        import_autoencoder(tmp_path)


def test_incomplete_and_hostile_folders(model, tmp_path):
    with pytest.raises(InteropError, match="not a folder"):
        WeightFiles(tmp_path / "none")
    with pytest.raises(InteropError, match="holds no weights"):
        WeightFiles(tmp_path)
    export_autoencoder(model, OBJECTIVE, tmp_path, max_shard_bytes=2000)
    index = tmp_path / "pytorch_model.bin.index.json"
    first = sorted(tmp_path.glob("*.bin"))[0]
    first.rename(tmp_path / "away")
    with pytest.raises(InteropError, match="download is incomplete"):
        WeightFiles(tmp_path)
    raw = json.loads(index.read_text())
    raw["weight_map"] = dict.fromkeys(raw["weight_map"], "../outside.bin")
    index.write_text(json.dumps(raw))
    with pytest.raises(InteropError, match="outside of its folder"):
        WeightFiles(tmp_path)


def test_pickled_code_is_not_run(tmp_path):
    class Attack:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    with (tmp_path / "pytorch_model.bin").open("wb") as file:
        pickle.dump({"x": Attack()}, file)
    with pytest.raises(InteropError, match="cannot be read"):
        WeightFiles(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_settings_we_cannot_build_are_named(model, tmp_path):
    export_autoencoder(model, OBJECTIVE, tmp_path)
    config = settings.read(tmp_path)
    settings.write({**config, "hidden_act": "gelu", "rope_scaling": {"factor": 2}}, tmp_path)
    with pytest.raises(InteropError, match=r"hidden_act 'gelu'.*rope_scaling"):
        import_autoencoder(tmp_path)
    del config["latent_size"]
    settings.write(config, tmp_path)
    with pytest.raises(InteropError, match="lacks 'latent_size'"):
        import_autoencoder(tmp_path)
    settings.write({**config, "latent_size": 6, "num_encoder_layers": 3}, tmp_path)
    with pytest.raises(InteropError, match="encoder_layers 3 is odd"):
        import_autoencoder(tmp_path)
