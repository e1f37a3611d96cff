"""Compile kernels of tree attention for a GPU that need not be there, and report on them as JSON.

    python tests/support/ahead_of_time.py hopper  bf16   90          64 128
                                  table   dtype  capability  head dimensions

prints a line for each pass (forward, query, key) and head dimension. It runs without TRITON_INTERPRET, under which
there is nothing to compile, so tests start it as a process of its own. `table` is hopper for the Gluon kernels, or
HOPPER, PORTABLE or FLOAT32, the configurations of `portable`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any

GROUP = 4
INDICES = {"end", "ends", "granules", "offsets", "partial", "order", "ranges", "query_offsets", "query_partial"}
INDICES |= {"query_order", "key_granules", "key_ranges", "key_order"}
TENSORS = {"q", "k", "v", "o", "do", "dq", "dk", "dv"}


@dataclass(frozen=True)
class Report:
    """What Triton and ptxas say of a kernel: bytes a thread spills, bytes a program shares, remarks, wgmma products."""

    kernel: str
    spills: int
    shared: int
    remarks: list[str]
    wgmma: int


def read(output: str) -> list[Report]:
    """The reports that a run of this file printed."""
    return [Report(**json.loads(line)) for line in output.splitlines()]


def main(table: str, dtype: str, capability: str, *widths: str) -> None:
    """Print the reports; the arguments are the header's."""
    from triton import knobs

    knobs.compilation.always_compile = True  # for the log, which only a compilation has
    knobs.nvidia.dump_ptxas_log = True
    build = hopper_source if table == "hopper" else portable_source
    for width in map(int, widths):
        for which in ("forward", "query", "key"):
            source, options = build(which, table, dtype, width)
            print(json.dumps(asdict(report(f"{which} {width}", source, options, int(capability)))))


def report(name: str, source: Any, options: dict[str, int], capability: int) -> Report:
    """Compile a kernel and report on it."""
    import triton
    from triton.backends.compiler import GPUTarget

    with redirect_stdout(StringIO()) as printed:
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    log = printed.getvalue()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        sass = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Report(
        kernel=name,
        spills=max(int(size) for size in re.findall(r"(\d+) bytes spill stores", log)),
        shared=made.metadata.shared,
        remarks=[line for line in log.splitlines() if re.search(r"warning|\(C\d+\)", line)],
        wgmma=sass.count("HGMMA"),
    )


def hopper_source(which: str, table: str, dtype: str, width: int) -> tuple[Any, dict[str, int]]:
    """A Gluon kernel as `hopper` launches it."""
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.experimental.gluon.language import NVMMASharedLayout

    from treepack.attention.hopper import launch as hopper
    from treepack.attention.hopper.forward import forward_kernel
    from treepack.attention.hopper.key_backward import key_kernel
    from treepack.attention.hopper.query_backward import query_kernel
    from treepack.attention.schedule import GRANULE, QUERY_BLOCK, QUERY_TILE

    kernels = {"forward": forward_kernel, "query": query_kernel, "key": key_kernel}
    constants = {"forward": hopper.FORWARD, "query": hopper.QUERY, "key": hopper.KEY}[which] | {"GROUP": GROUP}
    queries = QUERY_TILE if which == "key" else QUERY_BLOCK
    rows = {"q_descriptor": queries, "do_descriptor": queries, "k_descriptor": GRANULE, "v_descriptor": GRANULE}
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    described = {name: f"tensordesc<{dtype}{[count, width]},{layout!r}>" for name, count in rows.items()}
    return GluonASTSource(kernels[which], *signature(kernels[which], dtype, constants, described)), hopper.LAUNCH


def portable_source(which: str, table: str, dtype: str, width: int) -> tuple[Any, dict[str, int]]:
    """A Triton kernel as `portable` launches it with a table's configuration."""
    from triton.compiler import ASTSource

    from treepack.attention.portable import backward as portable_backward
    from treepack.attention.portable import forward as portable

    config = getattr(getattr(portable, table)[width], which)
    kernels = {"query": portable_backward._query_kernel, "key": portable_backward._key_kernel}
    kernel = kernels.get(which, portable._forward_kernel)
    constants = {"GROUP": GROUP, "BLOCK": config.block, "TILE": config.tile, "D": width, "BLOCK_D": width}
    constants["PRECISION"] = "ieee" if dtype == "fp32" else "tf32"
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return ASTSource(kernel, *signature(kernel, dtype, constants, {})), options


def signature(
    kernel: Any, dtype: str, constants: dict[str, Any], described: dict[str, str]
) -> tuple[dict[str, Any], dict[Any, Any], dict[Any, Any]]:
    """Types, constants and alignments of a kernel's arguments, as the launcher finds them for aligned tensors."""
    aligned = [["tt.divisibility", 16]]
    types: dict[str, Any] = {}
    alignments: dict[Any, Any] = {}
    for i, name in enumerate(kernel.arg_names):
        stem = name.removesuffix("_pointer")
        if name in constants:
            types[name] = "constexpr"
        elif name in described:
            types[name] = described[name]
        elif name.endswith(("strides", "_at")):
            types[name] = ("i32", "i32", "i32")
            alignments |= {(i, j): aligned for j in range(3) if name.endswith("strides")}
        elif stem in TENSORS | INDICES | {"lse", "delta"}:
            types[name] = f"*{dtype if stem in TENSORS else 'i32' if stem in INDICES else 'fp32'}"
            alignments[(i,)] = aligned
        else:
            types[name] = "fp32" if name in ("factor", "scale", "scale_log2") else "i32"
    return types, {(kernel.arg_names.index(name),): value for name, value in constants.items()}, alignments


if __name__ == "__main__":
    assert not os.environ.get("TRITON_INTERPRET"), "nothing is compiled under the interpreter"
    main(*sys.argv[1:])
