"""Patch sizes side by side, the crossover with the AR baseline, and what sampling and evaluation cost."""

from __future__ import annotations

from calm_scale.accounting.backbone_model import is_autoregressive, lm_of
from calm_scale.accounting.costs import (
    autoencoder_training_per_token,
    brier_per_token,
    evaluation_per_token,
    run_totals,
    token_costs,
)
from calm_scale.accounting.model import lm_parameters
from calm_scale.accounting.report import pictures
from calm_scale.accounting.report.document import Cell, Column, Section, Table
from calm_scale.accounting.sampling_cost import draws_at, expected_draws_uniform, per_token
from calm_scale.accounting.variants import baseline_at, baseline_of, with_patch_size
from calm_scale.config.run import RunConfig

PATCH_SIZES = (1, 2, 4, 8)
TEMPERATURES = {"1": 1.0, "0.75": 0.75, "0.5": 0.5, "1/3": 1 / 3}
SUPPORTS = (1, 2, 10, 100)
CANDIDATES = (1, 10, 50, 100, 200, 500)


def patch_size_section(config: RunConfig) -> Section:
    """K = 1, 2, 4, 8 on the same backbone beside the AR baseline, per token and per patch."""
    columns = (
        Column("model", "Model"),
        Column("patch_size", "K", "integer"),
        Column("latent_size", "l", "integer"),
        Column("parameters", "Params", "number"),
        Column("training", "Train/token", "flops"),
        Column("training_per_patch", "Train/patch", "flops"),
        Column("training_causal", "Train/token, causal", "flops"),
        Column("autoencoder", "AE train/token", "flops"),
        Column("inference", "Infer/token", "flops"),
        Column("inference_per_patch", "Infer/patch", "flops"),
        Column("training_ratio", "Train vs AR", "percent"),
        Column("inference_ratio", "Infer vs AR", "percent"),
    )
    baseline = baseline_of(config)
    reference = token_costs(baseline)
    variants = [(k, with_patch_size(config, k)) for k in PATCH_SIZES]
    rows = [_size_cells("AR baseline, same backbone", baseline, baseline)]
    rows += [_size_cells(f"CALM K = {k}", variant, baseline) for k, variant in variants]
    table = Table("patch_sizes", f"{config.name}: patch sizes side by side", columns, tuple(rows))
    costs = [(k, token_costs(variant)) for k, variant in variants]
    picture = pictures.patch_sizes(
        [(k, c.training, c.inference) for k, c in costs], reference.training, reference.inference
    )
    text = (
        "The number of positions is kept, so a sequence of K-token patches covers K times the text. "
        "The autoencoder's training stands apart, per token of its own training data."
    )
    return Section(
        f"patch_sizes.{config.name}", f"{config.name}: per token and per patch", (text,), (table,), (picture,)
    )


def crossover_section(config: RunConfig) -> Section:
    """Where CALM and the AR baseline cost the same."""
    if is_autoregressive(config):
        return Section(
            f"crossover.{config.name}", f"{config.name}: crossover", ("This run is the AR baseline itself.",)
        )
    costs, totals = token_costs(config), run_totals(config)
    baseline = baseline_of(config)
    reference = token_costs(baseline)
    saved = reference.training - costs.training
    equal = baseline_at(config, costs.training)
    rows: tuple[tuple[Cell, ...], ...] = (
        ("training FLOPs per token, this run", _flops(costs.training)),
        ("training FLOPs per token, AR baseline on the same backbone", _flops(reference.training)),
        (
            "tokens after which the autoencoder's training is repaid",
            f"{totals.autoencoder / saved:.3g}" if saved > 0 else "never: the baseline is cheaper",
        ),
        (
            "tokens the baseline sees for this run's FLOPs, autoencoder included",
            f"{totals.total / reference.training:.4g}",
        ),
        (
            "AR baseline of equal training FLOPs per token (same depth)",
            f"width {lm_of(equal).backbone.hidden_size}, {lm_parameters(equal) / 1e6:.0f}M parameters, "
            f"{_flops(token_costs(equal).training)} a token",
        ),
        (
            "candidates per patch at which inference costs as much as the same-backbone baseline",
            f"{draws_at(config, reference.inference):.1f}",
        ),
    )
    columns = (Column("what", "What"), Column("value", "Value"))
    table = Table("crossover", f"{config.name}: crossover with the AR baseline", columns, rows)
    return Section(f"crossover.{config.name}", f"{config.name}: crossover at equal FLOPs", (), (table,))


def sampling_section(config: RunConfig) -> Section:
    """Decoding with candidates, exact temperature sampling and evaluation, per token."""
    title = f"{config.name}: sampling and evaluation"
    if is_autoregressive(config):
        return Section(f"sampling.{config.name}", title, ("A softmax samples any temperature at one draw.",))
    batch = tuple((n, per_token(config, n), per_token(config, n) / per_token(config, 1)) for n in CANDIDATES)
    exact = tuple(
        (label, support, draws, per_token(config, draws))
        for label, t in TEMPERATURES.items()
        for support in SUPPORTS
        for draws in (expected_draws_uniform(support, t),)
    )
    evaluation: tuple[tuple[Cell, ...], ...] = (
        ("in-loop evaluation (training loss, forward)", evaluation_per_token(config)),
        (f"BrierLM, {config.evaluation.num_samples} samples at every patch start", brier_per_token(config)),
        ("autoencoder training", autoencoder_training_per_token(config)),
    )
    tables = (
        Table(
            "candidates",
            "Batch sampling (Algorithm 2): N candidates a patch",
            (
                Column("candidates", "N", "integer"),
                Column("per_token", "FLOPs/token", "flops"),
                Column("ratio", "× one draw", "number"),
            ),
            batch,
        ),
        Table(
            "exact",
            "Exact sampling (Algorithm 1): expected draws",
            (
                Column("temperature", "T"),
                Column("support", "equally likely patches", "integer"),
                Column("draws", "expected draws", "number"),
                Column("per_token", "FLOPs/token", "flops"),
            ),
            exact,
            note="(n + 1[α>0] Σ P^(1/T−1)) / Σ P^(1/T), 1/T = n + α: depends on the law; shown for uniform laws.",
        ),
        Table(
            "evaluation",
            "Other passes",
            (Column("what", "What"), Column("per_token", "FLOPs/token", "flops")),
            evaluation,
        ),
    )
    return Section(f"sampling.{config.name}", title, (), tables)


def _size_cells(name: str, config: RunConfig, baseline: RunConfig) -> tuple[Cell, ...]:
    costs, reference, k = token_costs(config), token_costs(baseline), config.patch_size
    autoregressive = is_autoregressive(config)
    return (
        name,
        k,
        None if autoregressive else config.latent_size,
        lm_parameters(config),
        costs.training,
        costs.training * k,
        costs.training_causal,
        None if autoregressive else autoencoder_training_per_token(config),
        costs.inference,
        costs.inference * k,
        costs.training / reference.training,
        costs.inference / reference.inference,
    )


def _flops(value: float) -> str:
    return f"{value:.3e}"
