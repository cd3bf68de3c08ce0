"""Gathering rows out of many memory maps with one numpy call.

A loop over samples costs about as much in Python as copying a sample does. All maps live in one address space,
so a single strided view that starts at the lowest of them reaches every row: row r of map m begins
(address_m − lowest + r · row_bytes) / unit units further on. Every index is checked, and every map is held as
long as the view.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray


class RowGatherer:
    """Rows of ``maps``, arrays [n_m, width] of one type, each C-contiguous, counted through: row i of the whole is
    row i − n_0 − … − n_{m−1} of map m."""

    def __init__(self, maps: list[NDArray[np.unsignedinteger]]) -> None:
        self._maps = maps  # keeps them mapped
        width, itemsize = maps[0].shape[1], maps[0].itemsize
        addresses = np.array([m.ctypes.data for m in maps], np.int64)
        lowest = int(addresses.argmin())
        apart = addresses - addresses[lowest]
        unit = math.gcd(width * itemsize, *apart.tolist())
        counts = np.array([len(m) for m in maps], np.int64)
        self.num_rows = int(counts.sum())
        self._ends = counts.cumsum()
        self._per_row = width * itemsize // unit
        # Row i of the whole, in map m, begins i · per_row + shift_m units after the lowest address.
        self._shifts = apart // unit - (self._ends - counts) * self._per_row
        last = int((apart // unit + (counts - 1) * self._per_row).max())
        self._rows = as_strided(maps[lowest], (last + 1, width), (unit, itemsize), writeable=False)

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.unsignedinteger]:
        """Copies of ``rows`` [n]: [n, width].

        Raises:
            IndexError: a row is outside [0, num_rows). The view reaches beyond the maps, so this check is what
                makes it safe.
        """
        if (
            len(rows) and rows.view(np.uint64).max() >= self.num_rows
        ):  # a negative number is a huge unsigned one
            raise IndexError(f"samples {rows.min()}…{rows.max()} are not all inside [0, {self.num_rows})")
        maps = self._ends.searchsorted(rows, "right")
        found: NDArray[np.unsignedinteger] = self._rows[rows * self._per_row + self._shifts[maps]]
        return found
