"""The published language-model layout: the same function, the same bits, and errors that list what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lm")


@pytest.fixture(scope="module")
def report(folder):
    program = Path(__file__).with_name("lm_program.py")
    result = subprocess.run(
        [sys.executable, str(program), str(folder)],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_imported_backbone_computes_what_the_published_weights_say(report):
    """Against a plain-torch Llama over the published tensors (grouped-query attention, rotate-half RoPE)."""
    assert report["hidden_apart"] < 1e-5


@pytest.mark.parametrize("container", ["bin", "safetensors"])
def test_round_trip_is_bit_equal(report, container):
    assert report[f"{container}_same_names"]
    assert report[f"{container}_same_bits"]
    assert report[f"{container}_round_trip"]
    assert report[f"{container}_shards"] > 2


def test_an_imported_folder_is_given_back_as_it_was(report):
    """Names, bits, the data type of every tensor, and every key of both config.json but the autoencoder's place."""
    assert all(report["given_back"].values()), report["given_back"]
    assert report["new_ae_path"] == "here"


def test_padding_row_is_cut_off_and_put_back(report):
    assert report["stripped_rows"] == 10
    assert report["padded_row_is_zero"]


def test_either_head_alias_is_enough_and_both_must_agree(report):
    assert report["one_alias"] is None
    assert "mlp_generator.noise_embd.bias differs" in report["other_alias"]


def test_missing_and_unexpected_tensors_are_listed(report):
    assert "missing (1): transformer.layers.1.mlp.up_proj.weight" in report["missing"]
    assert "unexpected (1): transformer.extra.weight" in report["unexpected"]


def test_a_wrong_shape_is_told_with_the_right_one(report):
    assert (
        "layers.1.self_attn.q_proj.weight is [15, 16], its config.json makes it [16, 16]"
        in report["misshapen"]
    )


def test_an_embedding_that_its_config_contradicts_is_refused(report):
    for rows, said in zip((7, 0, 22), report["tables"], strict=True):
        assert f"embed_tokens.weight is [{rows}, 16], its config.json makes it [11, 16]" in said
    assert "embed_tokens.weight is [11, 16], its config.json makes it [12, 16]" in report["larger_config"]


def test_sizes_that_no_memory_holds_are_refused(report):
    assert "1,000,000,002 layers" in report["many_blocks"]
    assert "no memory could hold" in report["wide_noise"]


def test_a_full_disk_is_an_error_of_its_own(report):
    assert report["full_disk"] == 28


def test_embedded_autoencoder_is_checked_and_ae_path_never_followed(report):
    assert "embeds another autoencoder" in report["other_ae"]
    assert "/home/somebody/ae" in report["no_ae"]
    assert "not followed" in report["no_ae"]
    assert report["embedded"]
    assert "autoencoder_config describes a model" in report["given_settings"]


def test_other_heads_are_refused(report):
    assert "only energy heads" in report["flow"]


def test_sharded_checkpoint_without_a_model_and_back(report):
    assert report["sharded_same_model"]
    assert report["sharded_same_bits"]
    assert "holds no weight nothing" in report["sharded_unknown"]


@pytest.mark.ranks
def test_any_layout_is_filled_with_the_same_weights(report, folder):
    """TP 2 and PP 2 on two gloo ranks write checkpoints whose every tensor is the published one."""
    program = str(Path(__file__).with_name("ranks_program.py"))
    ranks = [
        subprocess.Popen(
            [sys.executable, program, str(folder), str(rank)],
            env=ENV,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output[-3000:]
