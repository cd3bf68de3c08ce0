"""Keyed noise on a GPU: Philox numbers of every position in one kernel launch.

A row of the [B, p] grid is a stream of its own, keyed by (stream, sample, position) and counted by the place in the
row, so that its numbers depend on neither the layout nor the rows beside it. Rounding is fixed here and not by the
compiler: where a product and a sum are rounded once, the source says ``tl.fma``, and kernels are compiled with
``NO_FUSION``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NO_FUSION = {"enable_fp_fusion": False}
_MINUS_2_LN_2 = tl.constexpr(-1.3862943611198906)
_LOW_63_BITS = tl.constexpr((1 << 63) - 1)
_MOST_QUADS = 256
"""Blocks of four numbers that one program draws."""


@triton.jit
def sin_cos(w):  # type: ignore[no-untyped-def]
    """sin(πw/2) and cos(πw/2) for |w| ≤ 1, each within 2e-7: minimax polynomials in w², no range reduction."""
    t = w * w
    s = tl.fma(t, 0.000151678531895, -0.00467415749626)
    s = tl.fma(t, s, 0.0796899268668)
    s = tl.fma(t, s, -0.645963761292)
    s = tl.fma(t, s, 1.57079632009)
    c = tl.fma(t, 0.000858190619027, -0.0208106275187)
    c = tl.fma(t, c, 0.253650744635)
    c = tl.fma(t, c, -1.23369821467)
    c = tl.fma(t, c, 0.999999953467)
    return w * s, c


@triton.jit
def log2(x):  # type: ignore[no-untyped-def]
    """log₂ of a normal positive x within 4e-7 of its value; the result for 0, infinity and NaN has no meaning."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) & -0x800000  # x = 2^exponent · (1 + f) with 1 + f in [√½, √2)
    f = (bits - exponent).to(tl.float32, bitcast=True) - 1.0
    p = tl.fma(f, -0.145811778019, 0.234042398455)
    p = tl.fma(f, p, -0.248876848981)
    p = tl.fma(f, p, 0.287098695705)
    p = tl.fma(f, p, -0.360239640571)
    p = tl.fma(f, p, 0.480923242445)
    p = tl.fma(f, p, -0.721352788051)
    p = tl.fma(f, p, 1.44269496199)
    return tl.fma(f, p, exponent.to(tl.float32) * 1.1920928955078125e-07)


@triton.jit
def normal_pair(a, b):  # type: ignore[no-untyped-def]
    """Box-Muller: two independent N(0, 1) from two independent uniform uint32.

    The radius is √(−2 ln u) with u = (a + ½)/2³² in (0, 1]. The angle is πw with w = b/2³¹ in [−1, 1]; its sine
    and cosine come from those of half the angle.
    """
    u = tl.fma(a.to(tl.float32), 2.3283064365386963e-10, 1.1641532182693481e-10)
    radius = tl.sqrt(tl.maximum(log2(u) * _MINUS_2_LN_2, 0.0))
    s, c = sin_cos(b.to(tl.int32, bitcast=True).to(tl.float32) * 4.656612873077393e-10)
    doubled = 2.0 * radius * s
    return tl.fma(-doubled, s, radius), doubled * c


@triton.jit
def normal_quad(key, counter):  # type: ignore[no-untyped-def]
    """Four blocks of N(0, 1), a function of the position's key and the counter alone."""
    a, b, c, d = tl.randint4x(key, counter)
    e0, e1 = normal_pair(a, b)
    e2, e3 = normal_pair(c, d)
    return e0, e1, e2, e3


@triton.jit
def _mixed(x):  # type: ignore[no-untyped-def]
    """The scrambler of ``calm_scale.runtime.noise``."""
    x = ((x ^ (x >> 30)) * 0x3F58476D1CE4E5B9) & _LOW_63_BITS
    x = ((x ^ (x >> 27)) * 0x14D049BB133111EB) & _LOW_63_BITS
    return x ^ (x >> 31)


@triton.jit
def _uniform(word):  # type: ignore[no-untyped-def]
    """A multiple of 2⁻²⁴ in [0, 1) from a uniform uint32."""
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _rows_kernel(  # type: ignore[no-untyped-def]
    samples_ptr,
    out_ptr,
    first_row,
    first_position,
    num_positions,
    size,
    low,
    width,
    NORMAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of ``size`` numbers: quad c has numbers c, Q + c, 2Q + c, 3Q + c, with Q quads in the row."""
    row = first_row + tl.program_id(0)
    position = (first_position + row % num_positions).to(tl.int64)
    key = _mixed(tl.load(samples_ptr + row // num_positions) ^ _mixed(position))
    num_quads = (size + 3) // 4
    quad = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if NORMAL:
        e0, e1, e2, e3 = normal_quad(key, quad)
    else:
        a, b, c, d = tl.randint4x(key, quad)
        e0 = tl.fma(_uniform(a), width, low)
        e1 = tl.fma(_uniform(b), width, low)
        e2 = tl.fma(_uniform(c), width, low)
        e3 = tl.fma(_uniform(d), width, low)
    at = out_ptr + tl.program_id(0).to(tl.int64) * size + quad
    inside = quad < num_quads
    tl.store(at, e0, mask=inside)
    tl.store(at + num_quads, e1, mask=inside & (quad + num_quads < size))
    tl.store(at + 2 * num_quads, e2, mask=inside & (quad + 2 * num_quads < size))
    tl.store(at + 3 * num_quads, e3, mask=inside & (quad + 3 * num_quads < size))


def draw_rows(
    samples: torch.Tensor,
    positions: range,
    rows: slice[int, int, None],
    size: int,
    *,
    bounds: tuple[float, float] | None = None,
) -> torch.Tensor:
    """fp32 [rows, size] of the flattened [B, p] grid: N(0, 1), or uniform in [low, high) with ``bounds``.

    Args:
        samples: int64 [B] on the device, the key of each sample's stream.
        positions: the p positions of each sample.
    """
    num_rows = rows.stop - rows.start
    out = torch.empty(num_rows, size, dtype=torch.float32, device=samples.device)
    if out.numel() == 0:
        return out
    num_quads = (size + 3) // 4
    block = min(_MOST_QUADS, triton.next_power_of_2(num_quads))
    low, high = bounds or (0.0, 1.0)
    _rows_kernel[(num_rows, triton.cdiv(num_quads, block))](
        samples,
        out,
        rows.start,
        positions.start,
        len(positions),
        size,
        low,
        high - low,
        NORMAL=bounds is None,
        BLOCK=block,
        **NO_FUSION,
    )
    return out
