"""Evaluates twice on one rank of a gloo world and prints both results: ``ranks_program.py``.

With FAIL_RANK set, that rank's model breaks; every rank must then stop with a message.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import torch

from calm_scale.config.evaluation import EvaluationConfig
from calm_scale.evaluation.brier import EvaluationError
from calm_scale.evaluation.evaluate import evaluate
from calm_scale.evaluation.report import to_document
from calm_scale.runtime.world import init_world

spec = importlib.util.spec_from_file_location("laws", Path(__file__).with_name("conftest.py"))
laws = importlib.util.module_from_spec(spec)
spec.loader.exec_module(laws)


def main():
    world = init_world(device="cpu", timeout_seconds=60)
    chain = torch.tensor([[0.8, 0.15, 0.05], [0.1, 0.7, 0.2], [0.3, 0.1, 0.6]])
    model = laws.MarkovModel(chain, 2)
    sequences = model.sequences(5, 60)
    if os.environ.get("FAIL_RANK") == str(world.rank):
        model.vocab_size = 2
    config = EvaluationConfig(num_samples=3, bootstrap=100)
    try:
        results = [evaluate(model, sequences, config, bos_id=2, crew=world) for _ in range(2)]
        said = [{k: v for k, v in to_document(r).items() if k != "execution"} for r in results]
    except EvaluationError as error:
        said = str(error)
    print(json.dumps(said))
    world.close()


if __name__ == "__main__":
    main()
