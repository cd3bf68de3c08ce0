"""Pictures of an autoencoder evaluation."""

from __future__ import annotations

from pathlib import Path

from calm_scale.autoencoder.metrics import COLLAPSED_KL, AutoencoderReport


def draw_report(report: AutoencoderReport, path: Path) -> None:
    """Token accuracy against extra latent noise, and σ and KL of every latent dimension, as one picture.

    Args:
        report: an evaluation, ``DeepSpeedEngine.last_report`` for example.
        path: the file to write; its suffix (``.png``, ``.svg``, …) decides the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    accuracy, std, kl = figure.subplots(1, 3)
    accuracy.plot(report.noise_levels, [100 * value for value in report.noise_accuracy], marker="o")
    accuracy.set(title="Robustness", xlabel="extra latent noise δ", ylabel="token accuracy, %")
    dims = range(len(report.std_per_dim))
    std.bar(dims, sorted(report.std_per_dim), width=1.0)
    std.set(title=f"Posterior σ (mean {report.std:.3f})", xlabel="latent dimension, sorted", ylabel="σ")
    kl.bar(dims, sorted(report.kl_per_dim), width=1.0)
    kl.axhline(COLLAPSED_KL, color="grey", linestyle="--", linewidth=1)
    kl.set(
        title=f"KL ({report.collapsed_dims} of {len(dims)} collapsed)",
        xlabel="latent dimension, sorted",
        ylabel="KL, nats per patch",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
