"""Peak memory of ``ckpt import`` and ``ckpt export`` at the size of CALM-XL, and whether the round trip is exact.

    python benchmarks/interop.py [--config configs/runs/calm-xl.yaml] [--folder /tmp] [--set vocab_size=4096 ...]

Writes a published folder of random fp32 weights, imports it, exports it again (each the command a user types, in a
process of its own) and compares the bytes. Peak memory is the process's highest resident size, mapped files included.
Needs three and a half times the weights on disk (26 GB for XL), which it frees at the end. Prints ``name: value``.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from calm_scale.autoencoder.model import Autoencoder
from calm_scale.config import RunConfig, load
from calm_scale.config.autoencoder import AutoencoderStage
from calm_scale.config.lm import LMStage
from calm_scale.interop.autoencoder import export_autoencoder
from calm_scale.interop.language_model import export_language_model

ROOT = Path(__file__).resolve().parents[1]


def shapes(run: RunConfig, stage: LMStage) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Our weights by key, written out from the configuration."""
    b, d, k = stage.backbone, stage.backbone.hidden_size, run.patch_size
    yield "compressor.tokens.embedding.table.weight", (run.vocab_size, d)
    yield from _linear("compressor.tokens.expand", 2 * d, k * d)
    yield from _linear("compressor.tokens.contract", d, 2 * d)
    yield "compressor.norm.weight", (d,)
    yield "compressor.norm.bias", (d,)
    for i in range(b.num_layers):
        at = f"decoder.layers.{i}."
        yield at + "input_layernorm.weight", (d,)
        yield at + "self_attention.linear_qkv.weight", ((b.num_heads + 2 * b.query_groups) * b.head_dim, d)
        yield at + "self_attention.linear_proj.weight", (d, d)
        yield at + "pre_mlp_layernorm.weight", (d,)
        yield at + "mlp.linear_fc1.weight", (2 * b.ffn_size, d)
        yield at + "mlp.linear_fc2.weight", (d, b.ffn_size)
    yield "decoder.final_layernorm.weight", (d,)
    with torch.device("meta"):
        head = stage.head.build(stage, run.latent_size)
    for name, parameter in head.named_parameters():
        yield f"head.{name}", tuple(parameter.shape)


def _linear(name: str, rows: int, columns: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)


def publish(run: RunConfig, folder: Path) -> None:
    """A published folder of random weights and, inside it, of its autoencoder."""
    stage, section = run.lm, run.autoencoder
    if not (isinstance(stage, LMStage) and isinstance(section, AutoencoderStage)):
        raise SystemExit(f"{run.name} has no lm or no autoencoder section")
    generator = torch.Generator().manual_seed(0)
    shape_of = dict(shapes(run, stage))
    print(
        f"parameters_billion: {sum(torch.Size(s).numel() for s in shape_of.values()) / 1e9:.3f}", flush=True
    )
    autoencoder = Autoencoder(section.model, run.vocab_size, run.patch_size)
    export_autoencoder(autoencoder, section.objective, folder / "autoencoder", container="safetensors")
    export_language_model(
        run,
        lambda key: torch.empty(shape_of[key]).uniform_(-0.05, 0.05, generator=generator),
        autoencoder,
        folder,
        container="safetensors",
    )


def measured(name: str, *command: str) -> None:
    """Runs a command; prints the highest resident size of its process (MB, 10^6 bytes) and its seconds."""
    started = time.perf_counter()
    child = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
    print(f"{name}_peak_rss_mb: {usage.ru_maxrss * 1024 / 1e6:.0f}")
    print(f"{name}_seconds: {time.perf_counter() - started:.0f}", flush=True)


def same_weights(first: Path, second: Path) -> bool:
    """Whether two published folders hold the same weight files, byte for byte."""
    names = sorted(path.name for path in first.glob("*.safetensors*"))
    if names != sorted(path.name for path in second.glob("*.safetensors*")):
        return False
    return not any(filecmp.cmpfiles(first, second, names, shallow=False)[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=ROOT / "configs/runs/calm-xl.yaml")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--publish", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    run = load(asked.config, asked.overrides)
    if asked.publish:
        publish(run, asked.publish)
        return
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix="calm-scale-interop-") as name:
        published, imported, again = (Path(name) / part for part in ("published", "imported", "again"))
        asked_again = ["--config", str(asked.config), *(f"--set={text}" for text in asked.overrides)]
        subprocess.run([sys.executable, __file__, *asked_again, "--publish", str(published)], check=True)
        calm_scale = ("-m", "calm_scale", "ckpt")
        measured("import_xl", *calm_scale, "import", str(published), "--out", str(imported))
        checkpoint = imported / "lm" / "checkpoints" / "step_00000000"
        measured("export_xl", *calm_scale, "export", str(checkpoint), "--out", str(again))
        print(f"round_trip_bit_equal: {int(same_weights(published, again))}")


if __name__ == "__main__":
    main()
