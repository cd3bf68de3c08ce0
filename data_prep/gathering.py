"""Gathering rows out of many memory maps with one numpy call.

A loop over samples costs about as much in Python as copying a sample does. All maps live in one address space,
so a single strided view that starts at the lowest of them reaches every row: row r of map m begins
(address_m − lowest + r · row_bytes) / unit units further on. Which rows may be asked for is checked by the
caller against the manifest; every map is held as long as the view.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray


class RowGatherer:
    """Rows of ``maps``, arrays [n_m, width] of one type, each C-contiguous."""

    def __init__(self, maps: list[NDArray[np.unsignedinteger]]) -> None:
        self._maps = maps  # keeps them mapped
        width, itemsize = maps[0].shape[1], maps[0].itemsize
        addresses = np.array([m.ctypes.data for m in maps], np.int64)
        lowest = int(addresses.argmin())
        apart = (addresses - addresses[lowest]).tolist()
        unit = math.gcd(width * itemsize, *apart)
        self._per_row = width * itemsize // unit
        self._offsets = (addresses - addresses[lowest]) // unit
        last = max(int(o) + (len(m) - 1) * self._per_row for o, m in zip(self._offsets, maps, strict=True))
        self._rows = as_strided(maps[lowest], (last + 1, width), (unit, itemsize), writeable=False)

    def take(self, maps: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.unsignedinteger]:
        """Copies of row ``rows[i]`` of map ``maps[i]``: [len(rows), width]. Both must be in range."""
        found: NDArray[np.unsignedinteger] = self._rows[self._offsets[maps] + rows * self._per_row]
        return found
