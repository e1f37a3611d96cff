"""Compile the kernels of tree attention for a GPU that need not exist, and report on them as JSON.

    python tests/support/ahead_of_time.py  hopper/bf16/90/64               hopper/bf16/90/192/128
                                   table/dtype/capability/head dimension, or two of them if they differ

prints one line for each case and pass (forward, query, key). The kernels and their arguments come from the
same `Launch` values that the library runs, built here from tensors on the CPU.

Nothing is compiled under TRITON_INTERPRET, so tests start this file as a process of its own, without that variable.
`table` is hopper for the Gluon kernels, hopper+window for those with a window and sinks, or HOPPER, PORTABLE or
FLOAT32, the shapes in `portable_forward`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from typing import Any

import torch
from torch import Tensor

GROUP = 4  # query heads per key head, as in most models with grouped queries
LENGTH = 256  # any length compiles the same code, because kernels do not specialise on it
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "i32": torch.int32}


@dataclass(frozen=True)
class Report:
    """Findings of Triton and ptxas: a thread's registers and spilled bytes, a program's shared bytes, wgmma.

    `wgmma` counts asynchronous products, and `wgmma_registers` those that read their left matrix from registers.
    """

    kernel: str
    registers: int
    spills: int
    shared: int
    remarks: list[str]
    wgmma: int
    wgmma_registers: int


def read(output: str) -> list[Report]:
    """Return the reports in the output of a run of this file."""
    return [Report(**json.loads(line)) for line in output.splitlines()]


def main(*cases: str) -> None:
    """Print the reports; the header explains the arguments."""
    from triton import knobs

    knobs.compilation.always_compile = True  # a cached kernel has no log
    knobs.nvidia.dump_ptxas_log = True
    for case in cases:
        table, dtype, capability, *dims = case.split("/")
        for which in ("forward", "query", "key"):
            compilable, options = source(which, table, dtype, (int(dims[0]), int(dims[-1])))
            print(json.dumps(asdict(report(f"{which} {case}", compilable, options, int(capability)))))


def report(name: str, compilable: Any, options: dict[str, int], capability: int) -> Report:
    """Compile a kernel and report on it."""
    import triton
    from triton.backends.compiler import GPUTarget

    with redirect_stdout(StringIO()) as printed:
        compiled = triton.compile(compilable, target=GPUTarget("cuda", capability, 32), options=options)
    log = printed.getvalue()
    ptx = compiled.asm["ptx"]
    return Report(
        kernel=name,
        registers=max(int(count) for count in re.findall(r"Used (\d+) registers", log)),
        spills=max(int(size) for size in re.findall(r"(\d+) bytes spill stores", log)),
        shared=compiled.metadata.shared,
        remarks=[line for line in log.splitlines() if re.search(r"warning|\(C\d+\)", line)],
        wgmma=ptx.count("wgmma.mma_async"),
        # wgmma.mma_async... {%r1, ...}, {%r65, ...}, %rd7, ...;    a second list of registers is the left matrix
        wgmma_registers=len(re.findall(r"wgmma\.mma_async[^;{]*\{[^}]*\}[^;{]*\{", ptx)),
    )


def source(which: str, table: str, dtype: str, dims: tuple[int, int]) -> tuple[Any, dict[str, int]]:
    """Return the compilable source of one kernel, and the compiler options that the library launches it with."""
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    launch = launches(table, dtype, dims)[which]
    kind = GluonASTSource if table.startswith("hopper") else ASTSource
    return kind(launch.kernel, *signature(launch)), launch.options


def launches(table: str, dtype: str, dims: tuple[int, int]) -> dict[str, Any]:
    """Return the `Launch` of each pass over one row of one key head."""
    from treepack.attention.build_schedule import build_schedule
    from treepack.attention.kernel_launch import AttentionInputs, BackwardInputs
    from treepack.attention.reach import KeyReach, first_visible

    width, width_v = dims
    query, dq = (torch.empty(1, GROUP, LENGTH, width, dtype=DTYPES[dtype]) for _ in range(2))
    grad, out = (torch.empty(1, GROUP, LENGTH, width_v, dtype=DTYPES[dtype]) for _ in range(2))
    key, dk = (torch.empty(1, 1, LENGTH, width, dtype=DTYPES[dtype]) for _ in range(2))
    value, dv = (torch.empty(1, 1, LENGTH, width_v, dtype=DTYPES[dtype]) for _ in range(2))
    lse, delta = torch.empty(2, 1, GROUP, LENGTH)
    end = torch.full((1, LENGTH), LENGTH)
    has_window = table.endswith("+window")
    start = first_visible(end, KeyReach("window", 16)) if has_window else None
    sinks = torch.empty(GROUP) if has_window else None
    inputs = AttentionInputs(query, key, value, build_schedule(end, start), scale=1.0, sinks=sinks)
    incoming = BackwardInputs(grad, lse, delta)
    if table.startswith("hopper"):
        from treepack.attention.hopper import launch as hopper

        return {
            "forward": hopper.hopper_forward_launch(inputs, out, lse),
            "query": hopper.hopper_query_launch(inputs, incoming, dq),
            "key": hopper.hopper_key_launch(inputs, incoming, dk, dv),
        }
    from treepack.attention.portable import backward as portable_backward
    from treepack.attention.portable import forward as portable

    configs = getattr(portable, table.partition("+")[0])[width]
    return {
        "forward": portable.forward_launch(inputs, out, lse, configs.forward),
        "query": portable_backward.query_launch(inputs, incoming, dq, configs.query),
        "key": portable_backward.key_launch(inputs, incoming, dk, dv, configs.key),
    }


def signature(launch: Any) -> tuple[dict[str, Any], dict[Any, Any], dict[Any, Any]]:
    """Return types, constants and alignments of the parameters, as the launcher finds them for aligned tensors."""
    names = launch.kernel.arg_names
    assert set(names) == launch.arguments.keys() | launch.constants.keys(), "the launch passes every parameter"
    aligned = [["tt.divisibility", 16]]
    types: dict[str, Any] = {}
    alignments: dict[Any, Any] = {}
    for i, name in enumerate(names):
        if name in launch.constants:
            types[name] = "constexpr"
            continue
        types[name] = type_of(launch.arguments[name])
        if isinstance(launch.arguments[name], Tensor):
            alignments[(i,)] = aligned
        elif name.endswith("strides"):
            alignments |= {(i, j): aligned for j in range(3)}
    # {"GROUP": 4} and names [q, ..., GROUP at 21] -> {(21,): 4}
    return types, {(names.index(name),): value for name, value in launch.constants.items()}, alignments


def type_of(argument: Any) -> Any:
    """Return Triton's type of a run-time argument: `*bf16`, `i32`, `fp32`, a triple of i32, or a descriptor."""
    if isinstance(argument, Tensor):
        return f"*{short_name(argument.dtype)}"
    if isinstance(argument, tuple):
        return ("i32",) * len(argument)
    if isinstance(argument, (int, float)):
        return "fp32" if isinstance(argument, float) else "i32"
    # tensordesc<bf16[128, 64],NVMMASharedLayout(...)>
    return f"tensordesc<{short_name(argument.base.dtype)}{list(argument.block_shape)},{argument.layout!r}>"


def short_name(dtype: torch.dtype) -> str:
    """Return Triton's name of a dtype."""
    return next(name for name, known in DTYPES.items() if known == dtype)


if __name__ == "__main__":
    assert not os.environ.get("TRITON_INTERPRET"), "nothing is compiled under the interpreter"
    main(*sys.argv[1:])
