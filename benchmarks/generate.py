"""Generation's figures, both sides of each in one run, printed as ``name: value``.

    python benchmarks/generate.py [--quick]

- algorithm2_speedup: Algorithm 2's choice for N = 200 candidates and 32 rows over the per-row Counter form, each in a
  loop of its own of some 20 ms; algorithm2_speedup_cold: the same for one call of each, right after one of the other.
- cached_step_growth: time of one patch (backbone step, head, decoder) at 1024 patches of context over 128.
- calm_vs_ar_t1, calm_vs_ar_n100: tokens/s of CALM K = 4 over the softmax baseline of the same backbone, through the
  same ``generate``, at T = 1 and with Algorithm 2 at N = 100. Weights are random: speed does not depend on them, but
  the ratio depends on the sizes, which are printed.

The two sides of a figure take turns, and the figure is the median of the ratios of the rounds. Rounds that differ too
much give no figure but "too noisy".
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import torch
from _measure import ratios, say_ratio, seconds_by_round

from calm_scale.autoencoder.model import Autoencoder, FrozenAutoencoder
from calm_scale.config import RunConfig
from calm_scale.config.evaluation import GenerationConfig
from calm_scale.lm.build import build_models
from calm_scale.lm.patch_model import MegatronPatchModel, inference_layout
from calm_scale.sampling.batch import choose, take
from calm_scale.sampling.generate import Generation, generate

VOCAB, LAYERS, WIDTH, FFN, HEADS, K = 16_384, 8, 512, 1376, 8, 4


class Letters:
    """Generation needs a tokenizer; text is not measured here."""

    bos_id = None
    before_document, boundary_id = (), None
    eos_id = None

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: list[int]) -> str:
        return ""


def times(count: int, call: Callable[[], object]) -> Callable[[], None]:
    """``call``, that many times over."""

    def loop() -> None:
        for _ in range(count):
            call()

    return loop


def counter_form(candidates: torch.Tensor, n: int) -> torch.Tensor:
    """Algorithm 2 written row by row, as one would first."""
    chosen = []
    for row in candidates.transpose(0, 1).tolist():
        counts = Counter(tuple(patch) for patch in row)
        for order in range(n, 0, -1):
            weights = {patch: math.comb(c, order) for patch, c in counts.items() if c >= order}
            if weights:
                break
        chosen.append(random.choices(list(weights), weights=list(weights.values()))[0])
    return torch.tensor(chosen)


def algorithm2(rounds: int) -> None:
    generator = torch.Generator().manual_seed(0)
    pool = torch.randint(128_256, (32, 60, K), generator=generator)
    likely = torch.arange(1, 61).double().reciprocal().expand(32, 60)
    pick = torch.multinomial(likely, 200, True, generator=generator).T
    candidates = pool[torch.arange(32), pick]

    def vectorised() -> None:
        take(candidates, choose(candidates, 0.5, generator).index)

    def by_counter() -> None:
        counter_form(candidates, 2)

    loops = seconds_by_round({"ours": times(100, vectorised), "theirs": times(10, by_counter)}, rounds)
    ours, theirs = ([t / calls for t in loops[side]] for side, calls in (("ours", 100), ("theirs", 10)))
    cold = seconds_by_round({"ours": vectorised, "theirs": by_counter}, 10 * rounds)
    print(f"  Counter form {1e3 * min(theirs):.2f} ms, vectorised {1e3 * min(ours):.2f} ms")
    say_ratio("algorithm2_speedup", ratios(theirs, ours), 1)
    say_ratio("algorithm2_speedup_cold", ratios(cold["theirs"], cold["ours"]), 1)


def build(kind: str) -> MegatronPatchModel:
    run = RunConfig.model_validate(
        {
            "name": f"bench-{kind}",
            "vocab_size": VOCAB,
            "patch_size": 1 if kind == "softmax" else K,
            "autoencoder": {"model": {}, "training": {"steps": 1, "global_batch": 1}},
            "lm": {
                "backbone": {
                    "num_layers": LAYERS, "hidden_size": WIDTH, "ffn_size": FFN, "num_heads": HEADS,
                    "positions": 2048,
                },
                "head": {"kind": kind},
                "training": {"steps": 1, "global_batch": 1, "precision": "fp32"},
            },
        }
    )  # fmt: skip
    world = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    single, layout = inference_layout(run, world)
    model = build_models(single, layout, "fp32")[0]
    if kind == "softmax" or run.autoencoder is None:
        return MegatronPatchModel(model, single, None)
    torch.nn.init.normal_(model.head.final_layer.linears[2].weight, std=0.05)
    codec = FrozenAutoencoder(Autoencoder(run.autoencoder.model, VOCAB, K).requires_grad_(False))
    return MegatronPatchModel(model, single, codec)


def cached_step(model: MegatronPatchModel, rounds: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def at(context: int) -> Callable[[], None]:
        state = model.begin(1, 2048)
        model.advance(state, torch.randint(VOCAB, (1, context, K), generator=generator))
        patch = torch.randint(VOCAB, (1, 1, K), generator=generator)

        def step() -> None:
            model.draw(model.advance(state, patch), 1, generator)

        return step

    spent = seconds_by_round({"short": at(128), "long": at(1024)}, rounds)
    short, long = spent["short"], spent["long"]
    print(f"  a patch at 128 patches of context {1e3 * min(short):.2f} ms, at 1024 {1e3 * min(long):.2f} ms")
    say_ratio("cached_step_growth", ratios(long, short))


def against_baseline(
    calm: MegatronPatchModel, baseline: MegatronPatchModel, new_tokens: int, rounds: int
) -> None:
    prompts = [[1 + (7 * i + row) % 200 for i in range(64)] for row in range(4)]
    runs: dict[str, Generation] = {}

    def side(name: str, model: MegatronPatchModel, **changes: object) -> Callable[[], None]:
        settings = GenerationConfig.model_validate(
            {"algorithm": "plain", "max_new_tokens": new_tokens, "batch_size": 4, **changes}
        )

        def call() -> None:
            runs[name] = generate(model, Letters(), prompts, settings)

        return call

    sides = {
        "AR": side("AR", baseline),
        "CALM T=1": side("CALM T=1", calm),
        "CALM N=100": side("CALM N=100", calm, algorithm="batch", temperature=1 / 3, num_candidates=100),
    }
    spent = seconds_by_round(sides, rounds)
    tokens = {name: [runs[name].num_new_tokens / seconds for seconds in spent[name]] for name in sides}
    for name, result in runs.items():
        share = {k: v / result.total_seconds for k, v in sorted(result.seconds.items())}
        split = ", ".join(f"{k} {v:.0%}" for k, v in share.items() if v >= 0.005)
        print(f"  {name}: {max(tokens[name]):.1f} tokens/s ({split})")
    say_ratio("calm_vs_ar_t1", ratios(tokens["CALM T=1"], tokens["AR"]))
    say_ratio("calm_vs_ar_n100", ratios(tokens["CALM N=100"], tokens["AR"]), 3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds and tokens")
    quick = parser.parse_args().quick
    print(
        f"  {torch.get_num_threads()} threads, fp32; backbone {LAYERS} layers of {WIDTH}, V {VOCAB}, K {K}, "
        "4 prompts of 64 tokens"
    )
    algorithm2(30 if quick else 200)
    calm, baseline = build("energy"), build("softmax")
    cached_step(calm, 20 if quick else 60)
    against_baseline(calm, baseline, 32 if quick else 128, 2 if quick else 3)


if __name__ == "__main__":
    main()
