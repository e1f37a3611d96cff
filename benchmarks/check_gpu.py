"""Does tree attention hold on this GPU? Compiled FlexAttention against the float64 reference, and packed gradients.

    python benchmarks/check_gpu.py [--quick]

Needs torch with CUDA, triton and transformers, and neither polars nor ortools. Prints two tables: for every row length,
dtype and head layout the RMS of the difference over the RMS of the reference, for the output and the three gradients;
and for each tiny model the worst relative error of a parameter's gradient, packed against one by one. Exits 1 if a
bound is exceeded.

Bounds are derived from the format: 2**-24 relative rounding in float32 and 2**-9 in bfloat16, some 50 and 8 times over.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treepack.attention import build_block_mask, flex_attention, reference_attention
from treepack.attention.flex import BLOCK
from treepack.batch import Batch, make_batch
from treepack.model import load_model
from treepack.verify import verify_gradients

BOUND = {torch.float32: 50 * 2.0**-24, torch.bfloat16: 8 * 2.0**-9}
LENGTHS = (1, 12, 127, 128, 129, 200, 1000, 1024, 4095, 8192)
HEADS = ((4, 2, 64, None), (14, 2, 64, None), (8, 8, 128, 0.05), (16, 8, 128, None))
COMMON: dict[str, Any] = {"vocab_size": 320, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {**SMALL, "num_key_value_heads": 2, "head_dim": 32},
    "llama": {**SMALL, "num_key_value_heads": 4},
    "gpt_neox": {**SMALL},
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
}


def random_forest(length: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """`parent` of a random depth-first forest: runs, branches at any offset, now and then a new root."""
    generator = np.random.default_rng(seed)
    parent, path = np.full(length, -1), list[int]()
    for i in range(length):
        draw = generator.random()
        if path and draw < 0.02:
            del path[generator.integers(0 if draw < 0.002 else 1, len(path) + 1) :]
        parent[i] = path[-1] if path else -1
        path.append(i)
    return parent


def subtree_ends(parent: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """One past the last token of each token's subtree."""
    end = np.arange(1, len(parent) + 1)
    for i in range(len(parent) - 1, 0, -1):
        if parent[i] >= 0:
            end[parent[i]] = max(end[parent[i]], end[i])
    return end


def ratio(found: Tensor, expected: Tensor) -> float:
    """RMS of the difference over the RMS of `expected`."""
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm())


def check_attention(length: int, layout: tuple[int, int, int, float | None], dtype: torch.dtype) -> list[float]:
    """RMS ratios of the output and the gradients of query, key and value."""
    heads, kv_heads, size, scale = layout
    generator = torch.Generator("cuda").manual_seed(length)
    end = torch.tensor(subtree_ends(random_forest(length, length)), dtype=torch.int32, device="cuda")[None]
    shapes = [(1, heads, length, size), (1, kv_heads, length, size), (1, kv_heads, length, size)]
    rounded = [torch.randn(s, generator=generator, device="cuda").to(dtype) for s in shapes]
    inputs = [x.requires_grad_() for x in rounded]
    exact = [x.detach().double().requires_grad_() for x in rounded]
    weight = torch.randn(shapes[0], generator=generator, device="cuda").to(dtype)
    found = flex_attention(inputs[0], inputs[1], inputs[2], end, block_mask=build_block_mask(end), scale=scale)
    expected = reference_attention(exact[0], exact[1], exact[2], end, scale=scale)
    ours = (found, *torch.autograd.grad(found, inputs, weight))
    theirs = (expected, *torch.autograd.grad(expected, exact, weight.double()))
    # A row of one token has no gradient at its query and key: both sides are zero up to rounding.
    return [
        ratio(a, b) if length > 1 or i in (0, 3) else 0.0 for i, (a, b) in enumerate(zip(ours, theirs, strict=True))
    ]


def packed_row(length: int, row_id: int, vocabulary: int) -> Batch:
    """A random packed row whose every leaf ends one trajectory and whose every token but the roots is trained."""
    parent = random_forest(length, 1000 + row_id)
    generator = np.random.default_rng(row_id)
    leaves = np.setdiff1d(np.arange(length), parent)
    scale, position = np.zeros(length, np.int64), np.zeros(length, np.int64)
    scale[leaves] = 1
    for i in range(length - 1, -1, -1):
        if parent[i] >= 0:
            scale[parent[i]] += scale[i]
    for i in range(length):
        position[i] = position[parent[i]] + 1 if parent[i] >= 0 else 0
    row: Any = SimpleNamespace(
        row_id=row_id,
        step=None,
        input_ids=generator.integers(0, vocabulary, length),
        position_ids=position,
        parent=parent,
        subtree_end=subtree_ends(parent),
        scale=scale,
        loss_weight=np.where(parent >= 0, scale * 1.0, 0.0),
        trajectory_ids=[str(leaf) for leaf in leaves],
        trajectory_ends=leaves,
    )
    return make_batch(row, multiple=BLOCK if row_id % 2 else 1).to("cuda")


def check_model(kind: str, folder: Path, attention: str, dtype: torch.dtype) -> tuple[str, float, float, bool]:
    """The parameter that differs most, its error, the error of the loss, and whether both pass."""
    torch._dynamo.reset()
    path = folder / f"{kind}.json"
    path.write_text(json.dumps({"model_type": kind, **MODELS[kind], **COMMON}))
    loaded = load_model(path, attention=attention, dtype=dtype, device="cuda")
    rows = [packed_row(length, i, COMMON["vocab_size"]) for i, length in enumerate((65, 300, 511))]
    report = verify_gradients(loaded, rows)
    return *report.worst, report.loss_error, report.passed


def main() -> None:
    """Run every check and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer lengths and layouts")
    quick = parser.parse_args().quick
    began, failed = time.time(), False
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'length':>6} {'heads':>12} {'dtype':>9} {'output':>9} {'dq':>9} {'dk':>9} {'dv':>9}")
    for layout in HEADS[:2] if quick else HEADS:
        for dtype, bound in BOUND.items():
            torch._dynamo.reset()  # one layout and dtype need three compilations of at most eight
            for length in LENGTHS[2:7] if quick else LENGTHS:
                ratios = check_attention(length, layout, dtype)
                bad = not max(ratios) <= bound
                failed |= bad
                name, heads = str(dtype).removeprefix("torch."), "/".join(map(str, layout[:3]))
                cells = " ".join(f"{value:9.1e}" for value in ratios)
                print(f"{length:>6} {heads:>12} {name:>9} {cells}{'  FAIL' if bad else ''}", flush=True)
    print(f"\n{'model':>9} {'attention':>10} {'dtype':>8} {'gradient':>9} {'loss':>9}  worst parameter")
    with tempfile.TemporaryDirectory() as folder:
        for kind in MODELS:
            for attention, dtype in (("flex", torch.float32), ("reference", torch.float64)):
                worst, error, loss, passed = check_model(kind, Path(folder), attention, dtype)
                failed |= not passed
                name = str(dtype).removeprefix("torch.")
                mark = "" if passed else "  FAIL"
                print(f"{kind:>9} {attention:>10} {name:>8} {error:9.1e} {loss:9.1e}  {worst}{mark}", flush=True)
    print(f"\n{'FAILED' if failed else 'passed'} in {time.time() - began:.0f} s")
    sys.exit(failed)


if __name__ == "__main__":
    main()
