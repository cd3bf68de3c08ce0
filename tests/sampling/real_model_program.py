"""Evaluation and generation on tiny real models: ``real_model_program.py``; prints one JSON object.

Megatron's stand-in for CUDA is process-wide, so it stays out of the test process.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch

from calm_scale.autoencoder.model import Autoencoder
from calm_scale.config import RunConfig
from calm_scale.config.evaluation import EvaluationConfig, GenerationConfig
from calm_scale.evaluation.energy import score_texts
from calm_scale.evaluation.evaluate import evaluate
from calm_scale.evaluation.exact import evaluate_exact
from calm_scale.evaluation.report import to_document
from calm_scale.lm.build import build_models
from calm_scale.lm.patch_model import MegatronPatchModel, inference_layout
from calm_scale.sampling.generate import generate
from calm_scale.sampling.one_draw import ONE_DRAW
from calm_scale.sampling.temperature import TemperedModel

WORLD = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
V = 37


class Numbers:
    """Ids as text, two digits each; 35 is BOS, 36 EOS."""

    bos_id, eos_id = 35, 36
    before_document, boundary_id = (35,), 35

    def encode(self, text):
        return [int(text[i : i + 2]) for i in range(0, len(text), 2)]

    def decode(self, ids):
        return "".join(f"{i:02d}" for i in ids)


class Uncached:
    """The same model with its cache replaced by a whole forward pass a step."""

    def __init__(self, model):
        self.model = model
        self.patch_size, self.vocab_size, self.device = model.patch_size, model.vocab_size, model.device
        self.draw, self.hidden, self.shows = (
            model.draw,
            model.hidden,
            "law" if model.num_listed else "samples",
        )
        self.num_listed, self.stated_law = model.num_listed, model.stated_law
        self.draw_latents, self.decode_ids = model.draw_latents, model.decode_ids

    def begin(self, batch_size, max_patches):
        return {"patches": torch.empty(batch_size, 0, self.patch_size, dtype=torch.int64)}

    def advance(self, state, patches):
        state["patches"] = torch.cat([state["patches"], patches], 1)
        return self.model.hidden(state["patches"].flatten(1))[:, -1]


def build(patch_size, kind, world=WORLD, tensor=1):
    head = {"kind": kind} | {"energy": {"noise_size": 8}, "atoms": {"num_atoms": 12}}.get(kind, {})
    run = RunConfig.model_validate(
        {
            "name": "tiny",
            "vocab_size": V,
            "patch_size": patch_size,
            "autoencoder": {
                "model": {"latent_size": 8, "hidden_size": 16, "ffn_size": 16, "init_std": 0.3},
                "training": {"steps": 1, "global_batch": 1},
            },
            "lm": {
                "backbone": {
                    "num_layers": 2, "hidden_size": 32, "ffn_size": 48, "num_heads": 4, "positions": 24,
                    "init_std": 0.2,
                },
                "head": head,
                "training": {"steps": 1, "global_batch": 1, "precision": "fp32"},
            },
        }
    )  # fmt: skip
    single, layout = inference_layout(run, world, tensor)
    model = build_models(single, layout, "fp32")[0]
    codec = None
    if kind != "softmax":
        last = model.head.mixture.atoms if kind == "atoms" else model.head.final_layer.linears[2]
        torch.nn.init.normal_(last.weight, std=0.5, generator=torch.Generator().manual_seed(1))
        codec = Autoencoder(run.autoencoder.model, V, patch_size).eval().requires_grad_(False)
    return MegatronPatchModel(model, single, codec)


def same_scores(results):
    documents = [{k: v for k, v in to_document(r).items() if k != "execution"} for r in results]
    return all(d == documents[0] for d in documents)


def nearer_texts(model, prompts, settings):
    """Texts of both one-draw samplers, in batches of 3 and of 16."""
    return {
        kind: [
            [c.text for c in generate(model, Numbers(), prompts, changed).completions]
            for changed in (
                settings.model_copy(update={"algorithm": kind, "batch_size": size}) for size in (3, 16)
            )
        ]
        for kind in ONE_DRAW
    }


def main():
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    report = {}
    prompts = [torch.randint(35, (n,), generator=generator).tolist() for n in (1, 5, 8, 14, 3)]
    for patch_size, kind in ((1, "softmax"), (2, "energy"), (4, "energy"), (2, "atoms")):
        model = build(patch_size, kind)
        rows = [
            torch.randint(V, (length,), generator=generator).numpy()
            for length in [24 * patch_size] * 5 + [19]
        ]
        name = f"{kind}{patch_size}"
        config = EvaluationConfig(num_samples=3, bootstrap=100, batch_size=1)
        results = [
            evaluate(model, rows, config.model_copy(update={"batch_size": b}), bos_id=35) for b in (1, 4, 1)
        ]
        algorithm = "law" if kind == "atoms" else "batch"
        tempered = TemperedModel(model, algorithm, GenerationConfig(temperature=0.5, num_candidates=50))
        sharper = evaluate(tempered, rows, config, bos_id=35)
        report[name] = {
            "identical": same_scores(results),
            "collision": results[0].score.collision,
            "sharper_collision": sharper.score.collision,
            "sampler": sharper.protocol["sampler"],
            "positions": results[0].score.num_positions,
        }
        settings = GenerationConfig(
            algorithm=algorithm, max_new_tokens=10, temperature=0.5, num_candidates=16, batch_size=3
        )
        cached = generate(model, Numbers(), prompts, settings, max_patches=24)
        uncached = generate(Uncached(model), Numbers(), prompts, settings)
        report[name]["batches"] = [
            [c.text for c in generate(model, Numbers(), prompts, changed).completions]
            for changed in (settings.model_copy(update={"batch_size": size}) for size in (1, 2, 16))
        ]
        if kind == "energy":
            report[name]["nearer"] = nearer_texts(model, prompts, settings)
        report[name] |= {
            "texts": [c.text for c in cached.completions],
            "uncached_texts": [c.text for c in uncached.completions],
            "parts": sorted(cached.seconds),
            "finishes": [c.finish for c in cached.completions],
        }
        scores = score_texts(model, [row.tolist() for row in rows[:2]])
        report[name] |= {"score_kind": scores[0].kind, "score": scores[0].per_token}
        if kind == "softmax":
            exact = evaluate_exact(model, rows, config.model_copy(update={"num_samples": 16}))
            sampled = evaluate(model, rows, config.model_copy(update={"num_samples": 16})).score
            report[name] |= {
                "exact": exact.components,
                "sampled": sampled.components,
                "nats": exact.cross_entropy,
            }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
