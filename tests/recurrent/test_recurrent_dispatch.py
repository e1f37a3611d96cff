"""Choice of an implementation for a recurrent layer: by auto, by name with its refusals, and in the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support import interpreter  # noqa: F401
from support.attention_trees import star
from support.hybrid_models import HARD, load_hybrid
from support.refusal import refusal
from treepack.attention.dispatch import BatchSchedules
from treepack.errors import TreepackError
from treepack.model.forward import hidden_states
from treepack.recurrent import dispatch
from treepack.recurrent.dispatch import LayerProperties, choose_scan, resolve_scan, scan_obstacle, use_implementation

CPU, GPU = torch.device("cpu"), torch.device("cuda")
QWEN = LayerProperties(GPU, torch.bfloat16, 128, 128, has_delta=True, has_key_decays=False)
NO_FLOAT64 = "computes bfloat16, float16 and float32, not float64; use torch"
KIMI = QWEN._replace(has_key_decays=True)
MAMBA = QWEN._replace(keys=256, values=64, has_delta=False)


@pytest.fixture(autouse=True)
def _nothing_chosen() -> Iterator[None]:
    """Let no choice of a test be seen by another one."""
    choose_scan.cache_clear()
    yield
    choose_scan.cache_clear()


def installed(monkeypatch: pytest.MonkeyPatch, *, fla: bool) -> None:
    """Pretend that flash-linear-attention is installed, or that it is not."""
    reason = None if fla else "needs flash-linear-attention; install it"
    monkeypatch.setattr(dispatch, "obstacle_of_fla", lambda **_: reason)


def inputs(dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, g and beta of 11 tokens as leaves."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(11, 2, 16, generator=generator).div(4).to(dtype) for _ in range(3))
    g, beta = -torch.rand(11, 2, generator=generator), torch.rand(11, 2, generator=generator)
    return [x.requires_grad_() for x in (q, k, v, g, beta)]


@pytest.mark.parametrize(
    ("layer", "able"),
    [
        (QWEN, {"torch", "fla", "triton"}),
        (MAMBA, {"torch", "fla", "triton"}),
        (KIMI, {"torch", "fla"}),
        (QWEN._replace(dtype=torch.float64), {"torch"}),
        (QWEN._replace(values=512), {"torch"}),
        (KIMI._replace(has_delta=False), {"torch"}),
        (QWEN._replace(device=CPU), {"torch"}),
        (QWEN._replace(device=torch.device("mps")), {"torch"}),
    ],
)
@pytest.mark.parametrize("has_fla", [True, False])
def test_auto_takes_the_first_that_can_compute_the_layer(
    layer: LayerProperties, able: set[str], has_fla: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "is_interpreted", lambda: False)
    installed(monkeypatch, fla=has_fla)
    able = able if has_fla else able - {"fla"}
    assert {name for name in dispatch.NAMES if scan_obstacle(name, layer) is None} == able
    assert resolve_scan("auto", layer) == next(name for name in dispatch.AUTO["cuda"] if name in able)


@pytest.mark.parametrize(
    ("name", "layer", "reason"),
    [
        ("triton", KIMI, "computes one decay per head and the layer has one per key dimension; use fla or torch"),
        ("triton", QWEN._replace(keys=300), "takes states of at most 256 x 256, not 300 x 128; use torch"),
        ("fla", QWEN._replace(values=512), "takes states of at most 256 x 256, not 128 x 512; use torch"),
        (
            "triton",
            QWEN._replace(dtype=torch.float64),
            "computes bfloat16, float16 and float32, not float64; use torch",
        ),
        ("fla", QWEN._replace(dtype=torch.float64), NO_FLOAT64),
        ("fla", QWEN._replace(device=CPU), "needs a GPU and the tensors are on cpu; use torch"),
        ("fla", KIMI._replace(has_delta=False), "takes a decay per key dimension only with the delta rule; use torch"),
    ],
)
def test_a_named_implementation_says_what_it_cannot_compute(
    name: str, layer: LayerProperties, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, fla=True)
    assert scan_obstacle(name, layer) == reason
    assert refusal(resolve_scan, name, layer) == f"recurrent layer: {name} {reason}, or let auto choose"


def test_kernels_take_tensors_on_the_cpu_only_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = QWEN._replace(device=CPU)
    monkeypatch.setattr(dispatch, "is_interpreted", lambda: True)
    assert scan_obstacle("triton", layer) is None
    monkeypatch.setattr(dispatch, "is_interpreted", lambda: False)
    assert scan_obstacle("triton", layer) == "needs a GPU and the tensors are on cpu; use torch"
    x, weight = torch.zeros(3, 4), torch.zeros(4, 4)
    with use_implementation("triton"), pytest.raises(TreepackError, match="convolution: triton needs a GPU"):
        dispatch.convolve(x, weight, None, None, BatchSchedules(star(1, 2, 1)))


def test_an_unknown_name_is_refused_in_one_sentence() -> None:
    with (
        pytest.raises(TreepackError, match=r"^recurrent layers are 'mamba'; expected one of auto, torch, fla, triton$"),
        use_implementation("mamba"),
    ):
        raise AssertionError("the block does not run")


def test_the_log_names_the_choice_once_and_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(monkeypatch, fla=False)
    monkeypatch.setattr(dispatch, "AUTO", {"cuda": ("fla", "triton", "torch")})
    with caplog.at_level(logging.INFO, logger="treepack"):
        assert [resolve_scan("auto", QWEN) for _ in range(3)] == ["triton"] * 3
    assert caplog.messages == [
        "recurrent layers: triton on cuda in bfloat16, states of 128 x 128 (fla needs flash-linear-attention)"
    ]


def test_the_backward_pass_uses_what_the_forward_pass_did_also_outside_of_the_block() -> None:
    leaves, schedules = inputs(torch.float32), BatchSchedules(star(5, 2, 3))
    q, k, v, g, beta = leaves
    with use_implementation("triton"):
        out = dispatch.scan(q, k, v, g, beta, schedules)
        inside = torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
    with use_implementation("torch"):
        other = torch.autograd.grad(dispatch.scan(q, k, v, g, beta, schedules), leaves, torch.ones_like(out))
        outside = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert all(torch.equal(x, y) for x, y in zip(inside, outside, strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(inside, other, strict=True))


def test_the_kernels_and_plain_torch_agree_on_a_layer() -> None:
    (q, k, v, g, beta), schedules = inputs(torch.float32), BatchSchedules(star(5, 2, 3))
    found = {}
    for name in ("torch", "triton"):
        with use_implementation(name):
            found[name] = dispatch.scan(q, k, v, g, beta, schedules)
    assert (found["torch"] - found["triton"]).norm() < 1e-6 * found["torch"].norm()


def test_a_model_is_accepted_without_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Tensor:
        raise AssertionError("a kernel")

    monkeypatch.setattr("treepack.recurrent.kernels.convolution.triton_convolve", fails)
    monkeypatch.setattr("treepack.recurrent.kernels.autograd.triton_scan", fails)
    with use_implementation("triton"):
        loaded = load_hybrid(tmp_path, "qwen3_5_text", dtype=torch.float32)
        with pytest.raises(AssertionError, match="a kernel"):
            hidden_states(loaded, HARD)
