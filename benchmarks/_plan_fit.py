"""The fitted constants of the plan's step time: seven numbers, fitted to published rows by least squares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log

import numpy as np
from _published import MIXED, Row
from scipy.optimize import least_squares

from calm_scale.accounting.hardware import device
from calm_scale.accounting.kernels import EAGER, Software

PRIOR = 0.05
"""Weight of staying at the value that stands in the code, per e-fold."""


def fit(rows: Sequence[Row], programs: Mapping[str, Software]) -> dict[str, float]:
    """All constants at once, to the logarithm of predicted over measured; outliers weigh little."""
    start = _shipped(programs)
    values = np.array(list(start.values()))

    def residuals(scales: np.ndarray) -> np.ndarray:
        constants = dict(zip(start, values * scales, strict=True))
        errors = [log(predict(row, constants, programs) / row.measured) for row in rows]
        return np.array([*errors, *(PRIOR * np.log(scales))])

    found = least_squares(
        residuals, np.ones(len(values)), bounds=(0.3, 3.0), loss="soft_l1", f_scale=0.05, max_nfev=25
    )
    return dict(zip(start, values * found.x, strict=True))


def predict(row: Row, constants: Mapping[str, float], programs: Mapping[str, Software]) -> float:
    """Seconds of a row's step with these constants instead of those in the code."""
    chip = replace(row.device, products=constants[f"{row.device.key} products"])
    changed: dict[str, float] = {}
    if row.source == "H":
        changed["norm_passes"] = constants["mixed norm_passes"]
    if row.source == "NB":
        changed |= {
            "norm_passes": constants["eager norm_passes"],
            "logit_bytes": constants["eager logit_bytes"],
        }
    if row.source == "D":
        changed["overlap_tensor"] = constants["NeMo overlap_tensor"]
    if row.source in ("N", "NB"):
        changed["step_seconds"] = constants["nanotron step_seconds"]
    return row.predict(chip, replace(programs[row.source], **changed)).total


def _shipped(programs: Mapping[str, Software]) -> dict[str, float]:
    return {
        "a100 products": device("a100").products,
        "h100 products": device("h100").products,
        "mixed norm_passes": MIXED.norm_passes,
        "eager norm_passes": EAGER.norm_passes,
        "eager logit_bytes": EAGER.logit_bytes,
        "NeMo overlap_tensor": programs["D"].overlap_tensor,
        "nanotron step_seconds": programs["N"].step_seconds,
    }
