"""Compile the kernels of experts for a GPU that need not exist, and report on them as JSON.

    python tests/support/experts_ahead_of_time.py  HOPPER  90
                                                   config  capability

prints one line for each product: outer, gate_up, and product with both layouts of the weights, with an adapter of rank
16; for HOPPER without one too, and the narrow products of adapters. `config` is one of the
shapes in `experts.kernels`. Nothing is compiled under TRITON_INTERPRET, so tests start this file as a process.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from support.ahead_of_time import report

SIZES = {"size", "width", "height"}  # multiples of 64
FLOAT, COUNT = {"weights"}, {"num_experts"}
WEIGHTS: dict[str, Any] = {"NUM_N": 8, "GATHER": False, "TRANSPOSED": False}
TRANSPOSED = {"GATHER": True, "TRANSPOSED": True}
INT32, INT64 = {"experts", "firsts", "ends"}, {"tokens"}


def main(config: str, capability: str) -> None:
    """Print the reports; the header explains the arguments."""
    from triton import knobs

    from treepack.model.experts import kernels

    knobs.compilation.always_compile = True  # a cached kernel has no log
    knobs.nvidia.dump_ptxas_log = True
    chosen = getattr(kernels, config)
    blocks = {"BLOCK_M": kernels.BLOCK_M, "BLOCK_K": kernels.BLOCK_K}
    cases: list[tuple[Any, tuple[int, int], dict[str, Any]]] = [
        (kernels._outer_kernel, chosen.outer, {"NUM_M": 16, "NUM_N": 3}),
    ]
    if config == "HOPPER":  # products with A or B alone, and the gradient of B; they are smaller than the others
        cases += [
            (kernels._product_kernel, chosen.product, {**WEIGHTS, **adapter(0), "BLOCK_N": 16}),
            (kernels._outer_kernel, chosen.outer, {"NUM_M": 16, "NUM_N": 1, "BLOCK_N": 16}),
        ]
    for rank in (0, 16) if config == "HOPPER" else (16,):
        cases += [
            (kernels._gate_up_kernel, chosen.gate_up, {"NUM_N": 6, **adapter(rank)}),
            (kernels._product_kernel, chosen.product, {**WEIGHTS, **adapter(rank)}),
            (kernels._product_kernel, chosen.product, {**WEIGHTS, **TRANSPOSED, **adapter(rank)}),
        ]
    for kernel, (block, stages), constants in cases:
        options = {"num_warps": kernels.NUM_WARPS, "num_stages": stages}
        constants = {**blocks, "BLOCK_N": block, **constants}
        compilable = source(kernel, constants)
        name = f"{kernel.__name__} {constants['BLOCK_M']} {constants['BLOCK_N']} {constants.get('RANK', '')}"
        print(json.dumps(asdict(report(name, compilable, options, int(capability)))))


def adapter(rank: int) -> dict[str, int]:
    """Return the constants of a low-rank term; 0 without one."""
    return {"RANK": rank, "BLOCK_R": min(rank or 32, 32)}


def source(kernel: Any, constants: dict[str, Any]) -> Any:
    """Return the compilable source of a kernel on aligned bfloat16 tensors; gradients of weights are float32."""
    from triton.compiler import ASTSource

    names = kernel.arg_names
    types: dict[str, str] = {}
    aligned: dict[Any, Any] = {}
    for i, name in enumerate(names):
        types[name] = "constexpr" if name in constants else type_of(name, is_outer="NUM_M" in constants)
        if name not in constants and name not in COUNT:
            aligned[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, types, {(names.index(name),): value for name, value in constants.items()}, aligned)


def type_of(name: str, *, is_outer: bool) -> str:
    """Return Triton's type of a run-time argument."""
    if name in SIZES | COUNT:
        return "i32"
    if name in INT32 | INT64:
        return "*i64" if name in INT64 else "*i32"
    return "*fp32" if name in FLOAT or (is_outer and name == "out") else "*bf16"


if __name__ == "__main__":
    main(*sys.argv[1:])
