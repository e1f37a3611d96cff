"""Recurrent layers where flash-linear-attention, mamba-ssm, causal-conv1d and kernels are installed.

The kernels of flash-linear-attention run in Triton's interpreter. mamba-ssm and causal-conv1d need a GPU to be built,
so transformers chooses packages of these names whose functions fail.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.attention_trees import ends_of
from support.flat_scans import flat_scan
from support.hybrid_check import FAMILIES, check_family
from support.paths import ROOT
from support.token_scans import scan_tokens
from treepack.recurrent.chunks import find_parents, flatten_ends
from treepack.recurrent.levels import _functions, build_levels, obstacle_of_fla, scan_by_levels

pytestmark = pytest.mark.fla

# (True for a decay per key dimension, True for beta)
RULES = {"delta": (False, True), "kda": (True, True), "mamba2": (False, False)}


@pytest.fixture
def _interpreted() -> None:
    import support.interpreted_fla  # noqa: F401 (it changes Triton)


def make_arguments(count: int, rule: str, key_heads: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k [N, Hk, 16], v [N, 2, 16], g and perhaps beta; the last two are float32."""
    vector_decay, has_beta = RULES[rule]
    generator = torch.Generator().manual_seed(count)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k = (torch.nn.functional.normalize(draw(count, key_heads, 16), dim=-1) for _ in range(2))
    g = -draw(count, 2, *([16] if vector_decay else [])).abs() / 4
    columns = [q.to(dtype), k.to(dtype), draw(count, 2, 16).to(dtype), g]
    return [*columns, draw(count, 2).sigmoid()] if has_beta else columns


def gradients(outputs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """The outputs, and gradients of a sum of them with varied weights."""
    total = sum((x.double() * torch.arange(x.numel()).view(x.shape).sin()).sum() for x in outputs)
    assert isinstance(total, Tensor)
    return [*(x.detach() for x in outputs), *torch.autograd.grad(total, leaves)]


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((x.double() - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True))


def as_leaves(tensors: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    return [x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors]


def test_the_installed_version_can_be_used() -> None:
    assert obstacle_of_fla() is None
    assert obstacle_of_fla(vector_decay=True) is None


@pytest.mark.parametrize("rule", RULES)
def test_functions_of_the_package_name_the_arguments_that_levels_passes(rule: str) -> None:
    named = inspect.signature(_functions()[RULES[rule]]).parameters
    passed = "q k v g scale initial_state output_final_state cu_seqlens cu_seqlens_cpu".split()
    passed += {"delta": ["beta", "chunk_indices"], "kda": ["beta"], "mamba2": []}[rule]
    assert [name for name in passed if name not in named] == []


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("rule", RULES)
def test_functions_of_the_package_equal_their_definition_from_initial_to_final_states(rule: str) -> None:
    count = 20 if rule == "kda" else 70  # two chunks of kda take 20 seconds
    arguments = make_arguments(count, rule, 2)
    bounds = torch.tensor([0, 3, count])
    inputs = [x[None] for x in arguments] + [torch.randn(2, 2, 16, 16, generator=torch.Generator().manual_seed(1))]
    names = [*["q", "k", "v", "g", "beta"][: len(arguments)], "initial_state"]
    options: dict[str, Any] = {"scale": 1.0, "output_final_state": True}
    options |= {"cu_seqlens": bounds, "cu_seqlens_cpu": bounds}
    results = []
    function: Any
    for function, dtype in ((_functions()[RULES[rule]], None), (flat_scan, torch.float64)):
        leaves = as_leaves(inputs, dtype)
        outputs = function(**dict(zip(names, leaves, strict=True)), **options)
        results.append(gradients(list(outputs), leaves))
    # 40 rounding units of float32, from sums over 67 tokens
    assert largest_error(*results) < 40 * 2**-24


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        ("delta", torch.float32),
        ("delta", torch.float16),
        ("kda", torch.float32),
        ("mamba2", torch.float32),
        ("mamba2", torch.float16),
    ],
)
def test_scans_by_levels_equal_the_definition_token_by_token(rule: str, dtype: torch.dtype) -> None:
    # 3 levels, a node of one token, and padding; two chunks of kda take 20 seconds
    end = ends_of((3, -1), (5 if rule == "kda" else 66, 0), (2, 1), (1, 1), (1, 0), *[(1, -1)] * 3)
    arguments = make_arguments(end.numel(), rule, 1, dtype)
    results = []
    for is_fast, precision in ((True, None), (False, torch.float64)):
        leaves = as_leaves(arguments, precision)
        beta = leaves[4] if len(leaves) == 5 else None
        q, k, v, g = leaves[:4]
        out = (
            scan_by_levels(q, k, v, g, beta, build_levels(end))
            if is_fast
            else scan_tokens(q, k, v, g, beta, find_parents(flatten_ends(end)))
        )
        results.append(gradients([out], leaves))
    # 40 rounding units of float32, and of float16 8, because it only rounds factors of products
    assert largest_error(*results) < (40 * 2**-24 if dtype == torch.float32 else 8 * 2**-11)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_exact_where_the_package_is_installed(family: str) -> None:
    check_family(family, expected="fla." if family in ("qwen3_next", "kimi_linear") else None)


# Each function fails if it is called: on a tree treepack computes the layer, and alone transformers' code does.
CONVOLUTION = """
def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None, activation=None):
    raise AssertionError("called")


def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None):
    raise AssertionError("called")
"""
SCAN = """
def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, dt_softplus=False, **options):
    raise AssertionError("called")


def mamba_split_conv1d_scan_combined(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, **options):
    raise AssertionError("called")
"""


def test_gradients_are_exact_where_kernels_and_two_more_packages_are_installed(tmp_path: Path) -> None:
    (tmp_path / "causal_conv1d").mkdir()
    (tmp_path / "causal_conv1d" / "__init__.py").write_text(CONVOLUTION)
    folder = tmp_path / "mamba_ssm" / "ops" / "triton"
    folder.mkdir(parents=True)
    (folder / "ssd_combined.py").write_text(SCAN)
    (tmp_path / "mamba_ssm" / "__init__.py").write_text("import mamba_ssm.ops.triton.ssd_combined\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-m", "support.hybrid_check"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == FAMILIES
