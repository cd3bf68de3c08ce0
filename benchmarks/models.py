"""Figures of the model code against plain PyTorch, both sides measured in this run: one line ``name: value`` each.

python benchmarks/models.py            # all figures, a few minutes on two cores
python benchmarks/models.py --case X   # one measurement, as JSON (used by the above)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import _engines as engines
import _plain_calm as plain
import torch
from _measure import THREADS, extra_peak_mib, in_a_process, peak_mib, ratio_text, ratios, seconds_by_round

from calm_scale.lm.energy_score import energy_score
from calm_scale.lm.heads.energy.module import EnergyHead
from calm_scale.runtime.noise import PositionNoise

B, P, N, M, LATENT = 2, 511, 8, 100, 128
HEAD_WIDTH, HEAD_BLOCKS = 256, 4


def main() -> None:
    """Run one case in this process, or all of them in child processes and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=sorted(CASES))
    case = parser.parse_args().case
    if case:
        torch.set_num_threads(THREADS)
        print(json.dumps(CASES[case]()))
        return
    for text in figures():
        print(text, flush=True)


def figures() -> list[str]:
    """Each figure as ``name: value``, from one child process a case; ratios of times with their spread."""
    measured = {case: in_a_process(Path(__file__), case) for case in CASES}
    loss, step, head = measured["loss_time"], measured["step_time"], measured["head_time"]
    ours_mib, literal_mib = measured["loss_memory"]["mib"], measured["loss_memory_literal"]["mib"]
    step_memory = measured["step_memory"]["mib"] / measured["step_memory_literal"]["mib"]
    return [
        f"energy_loss_seconds: {min(loss['ours']):.3f}",
        f"energy_loss_literal_seconds: {min(loss['literal']):.3f}",
        ratio_text("energy_loss_speedup", ratios(loss["literal"], loss["ours"])),
        f"energy_loss_mib: {ours_mib:.3f}",
        f"energy_loss_memory: {ours_mib / literal_mib:.3f}",
        f"energy_loss_memory_m1000: {measured['loss_memory_m1000']['mib'] / ours_mib:.3f}",
        ratio_text("head_shared_speedup", ratios(head["repeated"], head["shared"])),
        f"train_step_seconds: {min(step['megatron']):.3f}",
        ratio_text("train_step_speedup", ratios(step["literal"], step["megatron"])),
        f"train_step_peak_mib: {measured['step_memory']['mib']:.3f}",
        f"train_step_memory: {step_memory:.3f}",
        ratio_text("megatron_vs_plain", ratios(step["same_model"], step["megatron"])),
    ]


def _loss_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    samples = torch.randn(B, P, N, LATENT, generator=g).requires_grad_()
    mean, log_std = torch.randn(2, B, P, LATENT, generator=g)
    return samples, mean, log_std * 0.1 - 1.2


def _loss(num_posterior: int = M) -> Callable[[], object]:
    samples, mean, log_std = _loss_inputs()

    def run() -> None:
        noise = PositionNoise(0, 0, range(B), range(P))
        energy_score(samples, mean, log_std, noise, num_posterior=num_posterior).mean().backward()

    return run


def _literal_loss() -> Callable[[], object]:
    samples, mean, log_std = _loss_inputs()

    def run() -> None:
        plain.literal_energy_loss(samples.permute(2, 0, 1, 3), mean, log_std, M).mean().backward()

    return run


def _warm() -> None:
    """Load the maths libraries before memory is counted."""
    x = torch.randn(4, 64, 64, requires_grad=True)
    torch.linalg.vector_norm(torch.bmm(x, x), dim=-1).sum().backward()


def _loss_memory(make: Callable[[], Callable[[], object]]) -> dict[str, float]:
    run = make()
    _warm()
    return {"mib": extra_peak_mib(run)}


def _head_time() -> dict[str, list[float]]:
    hidden = torch.randn(B, P, HEAD_WIDTH, requires_grad=True)
    shared = EnergyHead(HEAD_WIDTH, LATENT, num_blocks=HEAD_BLOCKS)
    repeated = plain.RepeatedHead(HEAD_WIDTH, LATENT, HEAD_BLOCKS)
    torch.nn.init.normal_(shared.final_layer.linears[2].weight, std=0.02)
    torch.nn.init.normal_(repeated.final[3].weight, std=0.02)
    return seconds_by_round(
        {
            "shared": lambda: shared(hidden, torch.rand(B, P, N, 64) - 0.5).square().mean().backward(),
            "repeated": lambda: repeated(hidden, N).square().mean().backward(),
        },
        repeats=15,
    )


def _step_time() -> dict[str, list[float]]:
    steps = {
        "megatron": engines.megatron_step(),
        "literal": engines.literal_step(),
        "same_model": engines.same_model_step(),
    }
    return seconds_by_round(steps, repeats=7)


def _step_memory(make: Callable[[], Callable[[], object]]) -> dict[str, float]:
    step = make()
    step()
    step()
    return {"mib": peak_mib()}


CASES: dict[str, Callable[[], Mapping[str, object]]] = {
    "loss_time": lambda: seconds_by_round({"ours": _loss(), "literal": _literal_loss()}, repeats=7),
    "loss_memory": lambda: _loss_memory(_loss),
    "loss_memory_literal": lambda: _loss_memory(_literal_loss),
    "loss_memory_m1000": lambda: _loss_memory(lambda: _loss(1000)),
    "head_time": _head_time,
    "step_time": _step_time,
    "step_memory": lambda: _step_memory(engines.megatron_step),
    "step_memory_literal": lambda: _step_memory(engines.literal_step),
}

if __name__ == "__main__":
    main()
