"""One of two ranks: the same models whole on each rank, then split over both; prints what each said.

Megatron's stand-in for CUDA is process-wide, so it stays out of the test process.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import torch

from calm_scale.config.evaluation import EvaluationConfig, GenerationConfig
from calm_scale.evaluation.evaluate import evaluate
from calm_scale.evaluation.report import to_document
from calm_scale.evaluation.sequences import Teams
from calm_scale.runtime.world import init_world
from calm_scale.sampling.generate import generate

spec = importlib.util.spec_from_file_location("real", Path(__file__).with_name("real_model_program.py"))
real = importlib.util.module_from_spec(spec)
spec.loader.exec_module(real)


def said(model, world, tensor):
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(35, (n,), generator=generator).tolist() for n in (9, 5, 1, 6)]
    out = {}
    for algorithm in ("plain", "batch", "exact"):
        settings = GenerationConfig(
            algorithm=algorithm, temperature=0.7, num_candidates=8, draw_budget=64, max_new_tokens=12, batch_size=3
        )  # fmt: skip
        done = generate(model, real.Numbers(), prompts, settings, max_patches=24)
        out[algorithm] = [c.token_ids for c in done.completions] + [done.num_draws]
    rows = [torch.randint(real.V, (21,), generator=generator).numpy() for _ in range(3)]
    settings = EvaluationConfig(num_samples=3, bootstrap=100)
    crew = world if tensor == 1 else Teams(world, tensor)
    out["score"] = to_document(evaluate(model, rows, settings, bos_id=35, crew=crew))
    out["groups"] = model.begin(1, 4).caches[0].keys.shape[1]
    return out


def main():
    world = init_world(device="cpu", timeout_seconds=60)
    report = {
        f"{kind}{k}": {tensor: said(real.build(k, kind, world, tensor), world, tensor) for tensor in (1, 2)}
        for k, kind in ((1, "softmax"), (2, "energy"), (4, "energy"))
    }
    print(json.dumps(report))
    world.close()


if __name__ == "__main__":
    main()
