"""The Triton energy loss without a GPU: interpreted against float64, and compiled for sm_80 and sm_90."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")


def test_interpreted_kernels_agree_with_float64():
    script = Path(__file__).with_name("interpret_triton.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "agree with float64" in done.stdout


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_the_kernel_compiles_without_a_gpu(capability, alpha):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from calm_scale.lm.energy_score_triton import _energy_kernel, block_sizes

    blocks = block_sizes(8, 128)
    num_warps = blocks.pop("num_warps")
    constants = {"IS_ONE": alpha == 1.0, "WANTS_GRAD": True, **blocks}
    types = ["*bf16", "*fp32", "*fp32", "*i64", "*fp32", "*fp32", "i32", "i32", "i32", "fp32"]
    names = [name for name in _energy_kernel.arg_names if name not in constants]
    signature = dict(zip(names, types, strict=True)) | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=_energy_kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps}
    )
    assert f"sm_{capability}" in compiled.asm["ptx"]
    assert len(compiled.asm["cubin"]) > 1000
