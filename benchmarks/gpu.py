"""Device, loss, head and training step on one GPU: seconds, achieved TFLOP/s and MFU, one line ``name: value`` each.

    python benchmarks/gpu.py                                   # CALM-M, micro-batch 4
    python benchmarks/gpu.py --config configs/lm/calm-xl.yaml --micro-batch 1
    python benchmarks/gpu.py --set lm.head.num_posterior=200
    python benchmarks/gpu.py --json measured.json              # then: calm-scale plan CONFIG --calibrate measured.json
    python benchmarks/gpu.py --dry-run                         # every line of it on a CPU, with tiny sizes

Exits 2, saying so, where there is no CUDA device. What ``--dry-run`` prints are no figures.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from calm_scale.accounting.costs import step_flops
from calm_scale.accounting.goodput import utilization
from calm_scale.config import RunConfig, load
from calm_scale.config.files import write_output
from calm_scale.lm.energy_score import energy_score
from calm_scale.lm.heads.energy.module import EnergyHead
from calm_scale.runtime.noise import PositionNoise

DEFAULT = Path(__file__).parents[1] / "configs" / "lm" / "calm-m.yaml"
TINY = (
    "vocab_size=256",
    "autoencoder.model.hidden_size=32",
    "autoencoder.model.ffn_size=32",
    "autoencoder.model.latent_size=8",
    "lm.backbone.num_layers=2",
    "lm.backbone.hidden_size=32",
    "lm.backbone.ffn_size=64",
    "lm.backbone.num_heads=4",
    "lm.backbone.positions=16",
)
"""Sizes that a CPU gets through in seconds."""


def main() -> int:
    """Measure what the configuration describes; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=DEFAULT)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--json", type=Path, help="write the device's rates for `calm-scale plan --calibrate`"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    asked = parser.parse_args()
    if not asked.dry_run and not torch.cuda.is_available():
        print(
            "benchmarks/gpu.py needs a CUDA device; none is visible (--dry-run goes without)", file=sys.stderr
        )
        return 2
    device = torch.device("cpu" if asked.dry_run else "cuda")
    batch = [f"lm.training.{key}={asked.micro_batch}" for key in ("global_batch", "micro_batch")]
    sizes = TINY if asked.dry_run else ()
    config = load(asked.config, overrides=["name=gpu-benchmark", *batch, *sizes, *asked.set])
    print(f"device: {name_of(device)}")
    measured = measure_device(device, tiny=asked.dry_run)
    for name, value in measured.items():
        print(f"{name}: {value:.4g}")
    if asked.json is not None:
        write_output(asked.json, json.dumps({"device": name_of(device), **measured}, indent=1) + "\n")
    measure_loss(config, device, asked.repeats)
    measure_head(config, device, asked.repeats)
    measure_step(config, device, asked.repeats)
    return 0


def name_of(device: torch.device) -> str:
    """The device as the table of peaks knows it."""
    return torch.cuda.get_device_name() if device.type == "cuda" else "CPU, tiny sizes: a dry run, no figures"


def measure_device(device: torch.device, *, tiny: bool) -> dict[str, float]:
    """Rates of large products, attention and copies, each run for seconds, so that the clock is that of a training."""
    size, heads, length = (128, 2, 64) if tiny else (8192, 16, 2048)
    kind = torch.float32 if tiny else torch.bfloat16
    a, b = torch.randn(2, size, size, device=device, dtype=kind)
    q, k, v = torch.randn(3, 4, heads, length, 128, device=device, dtype=kind).requires_grad_().unbind()
    target = torch.empty_like(a)

    def attend() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    pairs = 4 * heads * length * length / 2  # causal
    works: dict[str, tuple[Callable[[], object], float]] = {
        "products_per_second": (lambda: torch.mm(a, b), 2.0 * size**3),
        "attention_per_second": (attend, 3.5 * 2 * 2 * pairs * 128),
        "copy_bytes_per_second": (lambda: target.copy_(a), 2.0 * a.numel() * a.element_size()),
    }
    return {name: work / _sustained(call, device, tiny=tiny) for name, (call, work) in works.items()}


def _sustained(call: Callable[[], object], device: torch.device, *, tiny: bool) -> float:
    """Mean seconds of a call over a few seconds without a pause."""
    call()
    start, calls = time.perf_counter(), 0
    while not calls or time.perf_counter() < start + (0.01 if tiny else 3.0):
        for _ in range(20):
            call()
        calls += 20
        if device.type == "cuda":
            torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def measure_loss(config: RunConfig, device: torch.device, repeats: int) -> None:
    """Energy loss forward and backward, fused (on a GPU) and torch, at the configured N, M, l."""
    stage, batch = config.lm, config.lm.training.micro_batch
    positions, head, size = stage.backbone.positions, stage.head, config.latent_size
    samples = torch.randn(batch, positions, head.num_samples, size, device=device, requires_grad=True)
    mean = torch.randn(batch, positions, size, device=device)
    log_std = torch.full_like(mean, -1.2)
    noise = PositionNoise(0, 0, range(batch), range(positions), device=device)

    def run(backend: str) -> None:
        loss = energy_score(
            samples,
            mean,
            log_std,
            noise,
            num_posterior=head.num_posterior,
            alpha=head.alpha,
            backend=backend,
        )
        loss.mean().backward()

    for backend in ("triton", "torch") if device.type == "cuda" else ("torch",):
        seconds, mib = _measure(lambda backend=backend: run(backend), device, repeats)
        print(f"energy_loss_{backend}_seconds: {seconds:.5f}\nenergy_loss_{backend}_mib: {mib:.0f}")


def measure_head(config: RunConfig, device: torch.device, repeats: int) -> None:
    """Energy head forward and backward with shared h, in bf16."""
    stage, batch = config.lm, config.lm.training.micro_batch
    head = stage.head.build(stage, config.latent_size).to(device, torch.bfloat16)
    if not isinstance(head, EnergyHead):
        raise SystemExit(
            f"benchmarks/gpu.py measures the energy head; the configuration has {stage.head.kind}"
        )
    positions, d = stage.backbone.positions, stage.backbone.hidden_size
    hidden = torch.randn(batch, positions, d, device=device, dtype=torch.bfloat16, requires_grad=True)
    drawn = torch.rand(batch, positions, head.num_samples, head.noise_size, device=device) - 0.5
    seconds, mib = _measure(lambda: head(hidden, drawn).square().mean().backward(), device, repeats)
    blocks, n = stage.num_blocks, head.num_samples
    of_sample = blocks * 5 * d * d + d * d + d * (head.noise_size + config.latent_size)
    macs = batch * positions * (n * of_sample + (blocks + 1) * d * d)
    print(f"head_seconds: {seconds:.5f}\nhead_mib: {mib:.0f}\nhead_tflops: {6 * macs / seconds / 1e12:.1f}")


def measure_step(config: RunConfig, device: torch.device, repeats: int) -> None:
    """Whole optimizer step of the Megatron engine on this GPU, frozen encoder included."""
    from calm_scale.autoencoder.model import Autoencoder
    from calm_scale.runtime.world import init_world
    from calm_scale.training.engine import Batch
    from calm_scale.training.megatron.engine import MegatronEngine

    training = config.lm.training
    world = init_world()
    try:
        codec = Autoencoder(config.autoencoder.model, config.vocab_size, config.patch_size)
        engine = MegatronEngine(config, world, codec.to(world.device).eval().requires_grad_(False))
        length = config.lm.backbone.positions * config.patch_size
        tokens = torch.randint(config.vocab_size, (1, training.micro_batch, length))
        batch = Batch(1, tokens, torch.arange(training.micro_batch)[None])
        seconds, mib = _measure(lambda: engine.train_step(batch, 1e-4), world.device, repeats)
    finally:
        world.close()
    flops = step_flops(config)
    used = utilization(
        model_flops=flops,
        hardware_flops=flops,
        seconds=seconds,
        world_size=1,
        device=name_of(device),
        precision=training.precision,
    )
    print(f"step_seconds: {seconds:.4f}\nstep_peak_mib: {mib:.0f}")
    print(f"step_tokens_per_s: {training.micro_batch * length / seconds:.0f}")
    print(f"step_tflops: {flops / seconds / 1e12:.1f}\nstep_utilization: {used}")


def _measure(function: Callable[[], object], device: torch.device, repeats: int) -> tuple[float, float]:
    """Least seconds of a call, and how much memory its peak adds, MiB (nan on a CPU)."""
    on_gpu = device.type == "cuda"
    for _ in range(3):
        function()
    before = _settled_memory() if on_gpu else 0
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best, (torch.cuda.max_memory_allocated() - before) / 2**20 if on_gpu else math.nan


def _settled_memory() -> int:
    """Bytes allocated now, with everything finished; the peak is counted from here."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


if __name__ == "__main__":
    sys.exit(main())
