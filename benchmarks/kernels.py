"""The Triton energy kernel as NVIDIA GPUs get it, compiled without one: registers, spills, instructions a draw.

    python benchmarks/kernels.py              # the shapes of configs/lm, beside the kernel of before
    python benchmarks/kernels.py --sweep      # N, K, M, alpha, types, with and without gradient (ten minutes)

Instructions a draw are static SASS instructions: those of the loop over the four draws of a quad, and a fourth of the
rest of the loop over full quads. Those of before are recorded in ``data/energy_kernel_before.csv`` (Triton 3.9, the
same counting). Exits 1 where a build spills.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from calm_scale.lm.energy_score_triton import _energy_kernel, launch_options
from calm_scale.runtime.noise_triton import NO_FUSION, _rows_kernel

ARCHITECTURES = (80, 90, 100)
PATCH_SIZES = (1, 2, 4, 8)
LATENT_PER_TOKEN = 32
BEFORE = Path(__file__).parent / "data" / "energy_kernel_before.csv"
COLUMNS = (
    *("arch", "N × l", "M", "α", "samples", "gradient", "warps", "registers", "local memory"),
    *("instructions a draw", "before", "ratio"),
)
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_POINTERS = {
    "mean_ptr": "*fp32",
    "log_std_ptr": "*fp32",
    "keys_ptr": "*i64",
    "loss_ptr": "*fp32",
    "grad_ptr": "*fp32",
}


@dataclass(frozen=True)
class Case:
    """What one build is specialised for: N samples of size l, M draws, the exponent, the samples' type."""

    arch: int
    num_samples: int
    size: int
    num_posterior: int = 100
    alpha: float = 1.0
    dtype: str = "fp32"
    wants_grad: bool = True


@dataclass(frozen=True)
class Build:
    """What came out: registers a thread, bytes of local memory, instructions of a full quad's draw."""

    registers: int
    stack_bytes: int
    local_accesses: int
    instructions_per_draw: float
    warps: int
    metadata: Any

    @property
    def spills(self) -> bool:
        return self.stack_bytes > 0 or self.local_accesses > 0


def build(case: Case) -> Build:
    """Compile the kernel for a case as a launch would specialise it, and read the machine code."""
    options = launch_options(case.num_samples, case.size)
    tile = {name: options.pop(name) for name in ("BLOCK_N", "BLOCK_L", "UNROLL")}
    constants = {"IS_ONE": case.alpha == 1.0, "WANTS_GRAD": case.wants_grad, **tile}
    sizes = {"num_samples": case.num_samples, "size": case.size, "num_posterior": case.num_posterior}
    constants |= {name: 1 for name, value in sizes.items() if value == 1}  # a launch makes a 1 a constant
    types = {"samples_ptr": f"*{case.dtype}", **_POINTERS, **dict.fromkeys(sizes, "i32"), "alpha": "fp32"}
    names = _energy_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = [*(name for name in types if name.endswith("_ptr")), *(n for n in sizes if sizes[n] % 16 == 0)]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=_energy_kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", case.arch, 32), options=options)
    instructions, per_draw = _read_code(_disassemble("nvdisasm", compiled.asm["cubin"], "-c"))
    local = sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in instructions)
    return Build(*_usage(compiled), local, per_draw, options["num_warps"], compiled.metadata)


def build_noise(arch: int, *, normal: bool) -> tuple[int, int]:
    """Compile the kernel of keyed noise: registers a thread, bytes of stack."""
    names = _rows_kernel.arg_names
    types = {"samples_ptr": "*i64", "out_ptr": "*fp32", "low": "fp32", "width": "fp32"}
    constants = {"NORMAL": normal, "BLOCK": 128}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in ("samples_ptr", "out_ptr")}
    source = ASTSource(fn=_rows_kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(NO_FUSION))
    return _usage(compiled)


def _usage(compiled: Any) -> tuple[int, int]:
    """Registers a thread and bytes of stack."""
    text = _disassemble("cuobjdump", compiled.asm["cubin"], "-res-usage")
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if usage is None:
        raise RuntimeError(f"cuobjdump states no resource usage: {text}")
    return int(usage[1]), int(usage[2])


def read_before() -> dict[Case, tuple[int, int, float]]:
    """Registers, stack bytes and instructions a draw of the kernel of before, by case."""
    with BEFORE.open(newline="") as file:
        return {
            Case(int(row["arch"]), int(row["samples"]), int(row["size"]), alpha=float(row["alpha"])): (
                int(row["registers"]),
                int(row["stack_bytes"]),
                int(row["loop_instructions"]) / 4,
            )
            for row in csv.DictReader(file)
        }


def sweep() -> Iterator[Case]:
    """Every tile of N 2..16 and K 1..8 with each kind of launch, the largest tiles, and sizes that need padding."""
    tiles = [(n, LATENT_PER_TOKEN * k) for n in (2, 4, 8, 16) for k in PATCH_SIZES]
    for (n, size), alpha, dtype, grad, arch in itertools.product(
        tiles, (1.0, 1.5), ("fp32", "bf16"), (True, False), ARCHITECTURES
    ):
        yield Case(arch, n, size, alpha=alpha, dtype=dtype, wants_grad=grad)
    odd = [(3, 32, 7), (5, 17, 101), (12, 100, 100), (8, 128, 1), (8, 128, 16), (8, 128, 1000), (2, 1, 1)]
    large = [(2, 512, 100), (32, 256, 100), (64, 128, 100), (8, 1024, 100), (2, 2048, 100), (256, 32, 100)]
    for (n, size, m), alpha, arch in itertools.product(odd + large, (1.0, 1.5), ARCHITECTURES):
        yield Case(arch, n, size, m, alpha)


def main() -> int:
    """Compile and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", action="store_true", help="every combination, not only configs/lm")
    asked = parser.parse_args()
    before = read_before()
    print(_line(*COLUMNS))
    print(_line(*("---" for _ in COLUMNS)))
    spilled, most, ratios, count = 0, 0, [], 0
    for case in sweep() if asked.sweep else before:
        made = build(case)
        count, spilled, most = count + 1, spilled + made.spills, max(most, made.registers)
        print(_row(case, made, before.get(case)), flush=True)
        if case in before:
            ratios.append(made.instructions_per_draw / before[case][2])
    print(f"kernel_builds: {count}\nkernel_spills: {spilled}\nkernel_registers_max: {most}")
    print(f"kernel_instructions_ratio_max: {max(ratios):.3f}")
    return 1 if spilled else 0


def _row(case: Case, made: Build, before: tuple[int, int, float] | None) -> str:
    local = f"{made.stack_bytes} B, {made.local_accesses} accesses" if made.spills else "none"
    cells = [
        f"sm_{case.arch}",
        f"{case.num_samples} × {case.size}",
        str(case.num_posterior),
        f"{case.alpha:g}",
        case.dtype,
        "yes" if case.wants_grad else "no",
        str(made.warps),
        str(made.registers),
        local,
        f"{made.instructions_per_draw:.0f}",
    ]
    if before is None:
        cells += ["", ""]
    else:
        registers, stack, per_draw = before
        old = f"{per_draw:.0f} ({registers} registers" + (f", {stack} B stack)" if stack else ")")
        cells += [old, f"{made.instructions_per_draw / per_draw:.2f}"]
    return _line(*cells)


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _disassemble(tool: str, cubin: bytes, *flags: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [str(_TOOLS / tool), *flags, file.name], capture_output=True, text=True, check=True
        )
    return done.stdout


def _read_code(text: str) -> tuple[list[str], float]:
    """The instructions of a disassembly, and how many of them a draw of a full quad costs."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            if target := re.search(r"BRA.*?`\((\.L_\w+)\)", found[1]):
                branches.append((len(instructions), target[1]))
            instructions.append(found[1])
    loops = [(labels[to], at) for at, to in branches if labels.get(to, at + 1) <= at]
    start, end = max(loops, key=_length)
    inside = [loop for loop in loops if start < loop[0] and loop[1] < end]
    of_draw = max((_length(loop) for loop in inside), default=0)
    return instructions, (_length((start, end)) - of_draw) / 4 + of_draw


def _length(loop: tuple[int, int]) -> int:
    return loop[1] - loop[0] + 1


if __name__ == "__main__":
    sys.exit(main())
