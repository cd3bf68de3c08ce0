"""Figures of the model code against plain PyTorch, both sides measured in this run: one line ``name: value`` each.

python benchmarks/models.py            # all figures, a few minutes on two cores
python benchmarks/models.py --case X   # one measurement, as JSON (used by the above)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import _engines as engines
import _plain_calm as plain
import torch
from _measure import THREADS, best_seconds, extra_peak_mib, in_a_process, peak_mib

from calm_scale.lm.energy_score import energy_score
from calm_scale.lm.heads import EnergyHead
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
    for name, value in figures():
        print(f"{name}: {value:.3f}", flush=True)


def figures() -> list[tuple[str, float]]:
    """Name and value of each figure, from one child process a case."""
    measured = {case: in_a_process(Path(__file__), case) for case in CASES}
    loss, step, head = measured["loss_time"], measured["step_time"], measured["head_time"]
    ours_mib, literal_mib = measured["loss_memory"]["mib"], measured["loss_memory_literal"]["mib"]
    return [
        ("energy_loss_seconds", loss["ours"]),
        ("energy_loss_literal_seconds", loss["literal"]),
        ("energy_loss_speedup", loss["literal"] / loss["ours"]),
        ("energy_loss_mib", ours_mib),
        ("energy_loss_memory", ours_mib / literal_mib),
        ("energy_loss_memory_m1000", measured["loss_memory_m1000"]["mib"] / ours_mib),
        ("head_shared_speedup", head["repeated"] / head["shared"]),
        ("train_step_seconds", step["megatron"]),
        ("train_step_speedup", step["literal"] / step["megatron"]),
        ("train_step_peak_mib", measured["step_memory"]["mib"]),
        ("train_step_memory", measured["step_memory"]["mib"] / measured["step_memory_literal"]["mib"]),
        ("megatron_vs_plain", step["same_model"] / step["megatron"]),
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


def _head_time() -> dict[str, float]:
    hidden = torch.randn(B, P, HEAD_WIDTH, requires_grad=True)
    shared = EnergyHead(HEAD_WIDTH, LATENT, num_blocks=HEAD_BLOCKS)
    repeated = plain.RepeatedHead(HEAD_WIDTH, LATENT, HEAD_BLOCKS)
    torch.nn.init.normal_(shared.final_layer.linears[2].weight, std=0.02)
    torch.nn.init.normal_(repeated.final[3].weight, std=0.02)
    return best_seconds(
        {
            "shared": lambda: shared(hidden, torch.rand(B, P, N, 64) - 0.5).square().mean().backward(),
            "repeated": lambda: repeated(hidden, N).square().mean().backward(),
        },
        repeats=7,
    )


def _step_time() -> dict[str, float]:
    steps = {
        "megatron": engines.megatron_step(),
        "literal": engines.literal_step(),
        "same_model": engines.same_model_step(),
    }
    return best_seconds(steps, repeats=5)


def _step_memory(make: Callable[[], Callable[[], object]]) -> dict[str, float]:
    step = make()
    step()
    step()
    return {"mib": peak_mib()}


CASES: dict[str, Callable[[], dict[str, float]]] = {
    "loss_time": lambda: best_seconds({"ours": _loss(), "literal": _literal_loss()}, repeats=5),
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
