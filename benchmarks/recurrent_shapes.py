"""Times of the output kernels of recurrent layers in other shapes: tiles, warps and pipeline stages, on one GPU.

    python benchmarks/recurrent_shapes.py [--layers qwen3.5-4b,nemotron-h-8b] [--tokens 65536] [--tile-k 64 ...]
    TRITON_INTERPRET=1 python benchmarks/recurrent_shapes.py --dry-run      tiny sizes on the CPU

Prints one line for each kernel and shape, the shape in use first: milliseconds, the rate at which every tensor would be
read or written once, and the relative RMS of the difference to the results of the shape in use. That one is tested
against float64 (tests/recurrent/test_output_kernels.py, on a GPU too), so a difference above 0.01 is an error.

Shapes that do not fit the GPU are left out with the reason. Needs torch, triton and numpy.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import triton
from candidates import mend_interpreter
from layer_sizes import LAYERS, Layer
from torch import Tensor

from treepack.attention.kernel_launch import KernelLaunch
from treepack.recurrent.chunks import CHUNK, TokenChunks, build_chunks
from treepack.recurrent.kernels.outputs import (
    OutputConfig,
    OutputOperands,
    count_key_tiles,
    gradient_products_launch,
    local_launch,
    output_configs,
    outputs_launch,
)

TINY = {"tiny": Layer(1, 2, 32, 16, is_delta=True)}
# In bfloat16; results have their places here too, so that all shapes write to the same memory.
Tensors = dict[str, Tensor]


def draw_tensors(layer: Layer, chunks: TokenChunks, device: torch.device) -> Tensors:
    """Return random operands and gradients, and empty results, in bfloat16; a and da float32."""
    generator = torch.Generator(device).manual_seed(0)
    count, states = len(chunks.end), len(chunks.begin)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device, dtype=torch.bfloat16)

    keys = {name: draw(count, layer.key_heads, layer.keys) / layer.keys**0.5 for name in ("q", "k")}
    values = {name: draw(count, layer.heads, layer.values) for name in ("new", "do", "du", "o", "du_local")}
    both = {name: draw(states, layer.heads, layer.keys, layer.values) for name in ("h", "dh")}
    gradients = {name: draw(count, layer.heads, layer.keys) for name in ("dq", "dk", "dw")}
    # the sum of -0.05 from the first token of each chunk on
    place = torch.arange(count, device=device) % CHUNK + 1.0
    return {**keys, **values, **both, **gradients, "a": (-0.05 * place)[:, None].repeat(1, layer.heads)}


def build_launch(
    kernel: str, config: OutputConfig, tensors: Tensors, layer: Layer, chunks: TokenChunks
) -> tuple[KernelLaunch, Tensors, list[Tensor]]:
    """Return the launch of a kernel in a shape, its results, and the other tensors that it reads."""
    operands = OutputOperands(tensors["q"], tensors["k"], tensors["a"], chunks)
    shared = [operands.q, operands.k, operands.a]
    if kernel == "outputs":
        launch = outputs_launch(operands, tensors["new"], tensors["h"], tensors["o"], config)
        return launch, {"o": tensors["o"]}, [*shared, tensors["new"], tensors["h"]]
    if kernel == "local":
        launch = local_launch(operands, tensors["do"], tensors["du_local"], config)
        return launch, {"du": tensors["du_local"]}, [*shared, tensors["do"]]
    tiles = count_key_tiles(layer.keys, config)
    incoming = {name: tensors[name] for name in ("do", "dh", "du")}
    results = {name: tensors[name] for name in ("dq", "dk", "dw")}
    results["da"] = torch.empty(*operands.a.shape, tiles, device=operands.a.device)
    launch = gradient_products_launch(
        operands, tensors["new"], tensors["h"], incoming, results, config, delta=layer.is_delta
    )
    if not layer.is_delta:
        del results["dw"], incoming["du"]
    return launch, results, [*shared, tensors["new"], tensors["h"], *incoming.values()]


def list_shapes(used: OutputConfig, options: argparse.Namespace) -> list[OutputConfig]:
    """Return the shape in use, then all combinations of the options."""
    others = product(options.tile_k, options.tile_v, options.warps, options.stages)
    return list(dict.fromkeys([used, *(OutputConfig(*each) for each in others)]))


def compare_shapes(
    layer: Layer, chunks: TokenChunks, options: argparse.Namespace, device: torch.device
) -> Iterator[str]:
    """Yield a row of the table for every kernel and shape."""
    tensors = draw_tensors(layer, chunks, device)
    for kernel, used in output_configs(tensors["q"])._asdict().items():
        expected: Tensors = {}
        for config in list_shapes(used, options):
            launch, results, operands = build_launch(kernel, config, tensors, layer, chunks)
            for result in results.values():
                result.fill_(torch.nan)
            shape = " ".join(map(str, config))
            try:
                launch.run()
            except triton.runtime.errors.OutOfResources as error:
                yield f"| {kernel} | {shape} | does not fit: {error} | | |"
                continue
            # The shares of da are added, as their number depends on the shape.
            found = {name: x.sum(-1) if name == "da" else x.float() for name, x in results.items()}
            expected = expected or found
            difference = max(
                float((found[n].float() - x.float()).norm() / x.float().norm()) for n, x in expected.items()
            )
            ms: Any = 0.0 if options.dry_run else triton.testing.do_bench(launch.run, return_mode="median")
            moved = sum(x.numel() * x.element_size() for x in [*results.values(), *operands])
            rate = f"{moved / ms / 1e6:,.0f}" if ms else ""
            yield f"| {kernel} | {shape} | {ms:.3f} | {rate} | {difference:.1e} |"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--tile-k", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--tile-v", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--warps", type=int, nargs="+", default=[4])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Print the table of every layer."""
    options = parse(arguments)
    device = torch.device("cpu" if options.dry_run else "cuda")
    if options.dry_run:
        mend_interpreter()
        options.tokens, options.tile_k, options.tile_v, options.stages = 80, [16], [16], [1]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    name = "CPU" if options.dry_run else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}, commit {commit.stdout.strip()}\n")
    chunks = build_chunks(torch.full((1, options.tokens), options.tokens)).to(device)
    for layer_name, layer in (TINY if options.dry_run else {n: LAYERS[n] for n in options.layers.split(",")}).items():
        print(f"{layer_name}, {options.tokens:,} tokens; shape: tile of K, tile of V, warps, stages\n")
        print("| kernel | shape | ms | GB/s | difference |\n" + "|---" * 5 + "|", flush=True)
        for row in compare_shapes(layer, chunks, options, device):
            print(row, flush=True)
        print()


if __name__ == "__main__":
    main()
