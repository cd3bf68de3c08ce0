"""How often to save: expected goodput under failures, and the interval that maximises it.

δ seconds a save stops training, R seconds a restart takes, M the mean time between failures of the whole job
(exponential). Young (1974): τ ≈ √(2δM); Daly (2006) gives the higher-order form used here.
"""

from __future__ import annotations

import math

from calm_scale.config.training import NODE_MTBF_HOURS


def job_mtbf(num_nodes: int, node_mtbf_hours: float = NODE_MTBF_HOURS) -> float:
    """Seconds between failures of a job on ``num_nodes`` nodes."""
    return node_mtbf_hours * 3600 / num_nodes


def optimal_interval(save_seconds: float, mtbf_seconds: float) -> float:
    """Seconds of training between saves: √(2δM)·[1 + ⅓√(δ/2M) + ⅑·δ/2M] − δ for δ < 2M, else M (Daly)."""
    ratio = save_seconds / (2 * mtbf_seconds)
    if ratio >= 1:
        return mtbf_seconds
    root = math.sqrt(2 * save_seconds * mtbf_seconds)
    return root * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def expected_goodput(
    interval: float, save_seconds: float, restart_seconds: float, mtbf_seconds: float
) -> float:
    """Share of wall-clock time that becomes progress: τ / (M·e^{R/M}·(e^{(τ+δ)/M} − 1)).

    Failures strike at any time, also while saving and restarting; everything since the last save is lost.
    """
    m = mtbf_seconds
    exponent = (interval + save_seconds) / m
    if exponent + restart_seconds / m > 700:
        return 0.0
    return interval / (m * math.exp(restart_seconds / m) * math.expm1(exponent))
