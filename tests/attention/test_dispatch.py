"""tree_attention: every implementation equals the reference, auto takes the first that can run, the rest is refused."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from triton import knobs

from support import interpreter  # noqa: F401
from support.attention_trees import comb, random_tree
from support.refusal import refusal
from support.wrong_inputs import NO_KERNELS
from treepack.attention import prepare, reference_attention, resolve, takes_chains, tree_attention
from treepack.attention.autograd import has_hopper
from treepack.attention.chains import ChainRows, chain_attention, find_chains
from treepack.attention.dispatch import _shared_memory, choose, obstacle
from treepack.attention.flash import has_flash_attention_4
from treepack.errors import TreepackError

CPU, GPU = torch.device("cpu"), torch.device("cuda")
DTYPES = {"reference": torch.float64, "flex": torch.float64, "triton": torch.float32, "auto": torch.float64}
BOUND = {torch.float64: 1e-12, torch.float32: 1e-5}


def forests(length: int) -> Tensor:
    """subtree_end [2, T] of two different forests."""
    return torch.cat([random_tree(length, seed=length), random_tree(length, seed=length + 1)])


def inputs(length: int, dtype: torch.dtype, *, size: int = 16) -> list[Tensor]:
    """Tensors q of 2 heads, k and v of 1, [B, T, H, D] transposed as models pass them, and the output's gradient."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, length, heads, size) for heads in (2, 1, 1, 2)]
    made = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2) for s in shapes]
    return [*(x.requires_grad_() for x in made[:3]), made[3]]


def output_and_gradients(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, end: Tensor, **options: Any) -> list[Tensor]:
    out = tree_attention(q, k, v, end, **options)
    return [out, *torch.autograd.grad(out, (q, k, v), weight)]


@pytest.mark.parametrize("impl", DTYPES)
@pytest.mark.parametrize(("length", "scale"), [(1, None), (130, 0.3)])
def test_every_implementation_is_the_reference_in_output_and_gradients(
    impl: str, length: int, scale: float | None
) -> None:
    end, dtype = forests(length), DTYPES[impl]
    q, k, v, weight = inputs(length, dtype)
    results = output_and_gradients(q, k, v, weight, end, impl=impl, scale=scale)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = reference_attention(exact[0], exact[1], exact[2], end, scale=scale)
    assert results[0].dtype == dtype
    theirs = [expected, *torch.autograd.grad(expected, exact, weight.double())]
    # A single token has zero gradients of q and k, up to rounding, so they are compared with the gradient of v.
    floors = [0.0, *[float(theirs[3].norm()) if length == 1 else 0.0] * 2, 0.0]
    for ours, other, floor in zip(results, theirs, floors, strict=True):
        assert (ours.detach().double() - other).norm() <= BOUND[dtype] * max(float(other.detach().norm()), floor)


@pytest.mark.parametrize("impl", DTYPES)
def test_rows_that_are_alike_may_share_one_subtree_end(impl: str) -> None:
    end = random_tree(30, seed=3)
    q, k, v, _ = (x.detach() for x in inputs(30, DTYPES[impl]))
    assert torch.equal(
        tree_attention(q, k, v, end[0], impl=impl), tree_attention(q, k, v, end.expand(2, -1), impl=impl)
    )


@pytest.mark.parametrize("impl", ["flex", "triton"])
def test_a_prepared_schedule_serves_every_layer_and_recomputation(impl: str) -> None:
    end = forests(40)
    q, k, v, weight = inputs(40, DTYPES[impl])
    schedule = prepare(end, impl)
    expected = output_and_gradients(q, k, v, weight, end, impl=impl)
    assert torch.equal(tree_attention(q, k, v, end, impl=impl, schedule=schedule), expected[0])
    out: Any = checkpoint(tree_attention, q, k, v, end, impl=impl, schedule=schedule, use_reentrant=False)
    again = [out, *torch.autograd.grad(out, (q, k, v), weight)]
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


@pytest.mark.parametrize("impl", ["reference", "flex", "triton"])
def test_autocast_lowers_nothing(impl: str) -> None:
    q, k, v, weight = inputs(9, torch.float32)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = tree_attention(q, k, v, forests(9), impl=impl)
        results.append([out, *torch.autograd.grad(out, (q, k, v), weight)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_kernels_run_as_they_are_in_compiled_code() -> None:
    q, k, v, weight = inputs(9, torch.float32)
    end = forests(9)
    schedule = prepare(end, "triton")

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tree_attention(2 * q, k, v, end, impl="triton", schedule=schedule) + v

    compiled: Any = torch.compile(layer, backend="eager")
    results = [[out, *torch.autograd.grad(out, (q, k, v), weight)] for out in (compiled(q, k, v), layer(q, k, v))]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_differentiating_twice_is_refused() -> None:
    q, k, v, _ = inputs(9, torch.float32)
    (grad,) = torch.autograd.grad(
        tree_attention(q, k, v, forests(9), impl="triton").square().sum(), q, create_graph=True
    )
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()  # type: ignore[no-untyped-call]


def test_the_output_of_the_kernel_is_laid_out_as_models_want_it() -> None:
    q, k, v, _ = (x.detach() for x in inputs(20, torch.float32))
    assert tree_attention(q, k, v, forests(20), impl="triton").transpose(1, 2).is_contiguous()


REFUSED: list[tuple[str, torch.dtype, tuple[int, int], str]] = [
    ("magic", torch.float32, (16, 16), "attention is 'magic'; expected one of auto, reference, flex, flash, triton"),
    ("flash", torch.bfloat16, (16, 16), "flash needs a Hopper or Blackwell GPU and the tensors are on cpu"),
    ("triton", torch.float64, (16, 16), "triton computes bfloat16, float16 and float32, not float64"),
    ("triton", torch.float32, (16, 520), "triton takes head dimensions of at most 512, not 16/520; use reference"),
]


@pytest.mark.parametrize(("impl", "dtype", "dims", "message"), REFUSED)
def test_an_implementation_that_cannot_run_is_refused_by_name(
    impl: str, dtype: torch.dtype, dims: tuple[int, int], message: str
) -> None:
    q, k = (torch.zeros(1, 2, 9, dims[0], dtype=dtype) for _ in range(2))
    with pytest.raises(TreepackError, match=message) as caught:
        tree_attention(q, k, torch.zeros(1, 2, 9, dims[1], dtype=dtype), torch.full((9,), 9), impl=impl)
    assert "\n" not in str(caught.value)


def test_the_refusal_before_torch_is_imported_is_the_one_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    assert refusal(resolve, "triton", CPU, torch.float32) == NO_KERNELS


def test_tensors_of_different_dtypes_are_refused_where_a_kernel_would_misread_them() -> None:
    q, k, v, _ = inputs(9, torch.float32)
    assert "v torch.float16; expected one dtype" in refusal(
        tree_attention, q, k, v.half(), torch.full((9,), 9), impl="flex"
    )


@pytest.mark.parametrize(
    ("impl", "made_for", "message"),
    [
        ("triton", "flex", "the schedule is a BlockMask, which triton does not take"),
        ("flex", "triton", "the schedule is a Schedule, which flex does not take"),
        ("reference", "flex", "which reference does not take"),
    ],
)
def test_a_schedule_of_another_implementation_is_refused(impl: str, made_for: str, message: str) -> None:
    q, k, v, _ = inputs(9, torch.float32)
    end = forests(9)
    with pytest.raises(TreepackError, match=message):
        tree_attention(q, k, v, end, impl=impl, schedule=prepare(end, made_for))


@pytest.mark.parametrize("impl", ["flex", "triton"])
@pytest.mark.parametrize("end", [forests(200), random_tree(9, seed=1)], ids=["longer", "one row"])
def test_a_schedule_of_other_rows_is_refused(impl: str, end: Tensor) -> None:
    q, k, v, _ = inputs(9, torch.float32)
    assert "pass the schedule of these rows" in refusal(
        tree_attention, q, k, v, forests(9), impl=impl, schedule=prepare(end, impl)
    )


class GpuProperties(NamedTuple):
    """The properties of a GPU, as torch returns them."""

    shared_memory_per_block_optin: int


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine that reports a Hopper GPU, without flash-attn."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: GpuProperties(227 << 10))
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    caches = (choose, has_flash_attention_4, has_hopper, _shared_memory)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def flash_attention_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hopper: None) -> None:
    """A Hopper machine with flash-attn-4 on its path."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "flash_attn")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("dtype", "dims", "expected"),
    [
        (torch.bfloat16, [(128, 128)], "triton"),
        (torch.float16, [(80, 80)], "triton"),
        (torch.float32, [(256, 256)], "triton"),
        (torch.bfloat16, [(192, 128)], "triton"),
        (torch.bfloat16, [(128, 128), (512, 512)], "triton"),
        (torch.bfloat16, [(576, 512)], "reference"),
        (torch.float64, [(64, 64)], "reference"),
    ],
)
def test_auto_on_a_gpu_takes_the_first_that_can_run(
    dtype: torch.dtype, dims: list[tuple[int, int]], expected: str
) -> None:
    assert resolve("auto", GPU, dtype, *dims) == expected


def test_auto_elsewhere_takes_the_reference() -> None:
    assert resolve("auto", CPU, torch.float32, (64, 64)) == "reference"
    assert resolve("auto", torch.device("mps"), torch.float16, (64, 64)) == "reference"


@pytest.mark.usefixtures("flash_attention_4")
def test_flash_is_there_for_what_flash_attention_4_takes() -> None:
    assert resolve("flash", GPU, torch.bfloat16, (64, 64), (128, 96)) == "flash"
    for dtype, dims in ((torch.float32, (64, 64)), (torch.bfloat16, (256, 256)), (torch.bfloat16, (68, 68))):
        with pytest.raises(TreepackError, match=r"^attention: flash (computes|takes)"):
            resolve("flash", GPU, dtype, dims)


@pytest.mark.usefixtures("hopper")
def test_flash_without_flash_attention_4_says_what_to_install() -> None:
    assert "flash needs FlashAttention-4; pip install flash-attn-4" in refusal(
        resolve, "flash", GPU, torch.bfloat16, (64, 64)
    )


@pytest.mark.usefixtures("hopper")
def test_the_log_names_what_auto_took_once_and_why_not_what_comes_before(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="treepack")
    for _ in range(3):
        resolve("auto", GPU, torch.bfloat16, (576, 512))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "attention: reference on cuda in bfloat16, head dimensions 576/512 "
        "(triton takes head dimensions of at most 512, not 576/512; flash needs FlashAttention-4; "
        "flex runs out of shared memory on a GPU with head dimensions above 256, and they are 576/512)"
    )


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("size", "dtype", "reason"),
    [
        (227, torch.float32, None),
        (163, torch.float32, "needs 194 KiB of shared memory for head dimensions above 256, and cuda has 163"),
        (163, torch.bfloat16, None),
        (99, torch.bfloat16, "needs 112 KiB of shared memory for head dimensions above 256, and cuda has 99"),
    ],
)
def test_wide_heads_need_a_gpu_with_shared_memory_for_their_tiles(
    monkeypatch: pytest.MonkeyPatch, size: int, dtype: torch.dtype, reason: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: GpuProperties(size << 10))
    assert obstacle("triton", GPU, dtype, (256, 256)) is None
    told = obstacle("triton", GPU, dtype, (512, 512))
    assert told is None if reason is None else told is not None and told.startswith(reason)


def branches(end: Tensor) -> bool:
    """Return whether some token of subtree_end [T] has two children; slow, from the intervals."""
    # The parent of token j is the last earlier token whose subtree contains j.
    parents = [max((k for k in range(j) if end[k] > j), default=None) for j in range(len(end))]
    non_roots = [parent for parent in parents if parent is not None]
    return len(non_roots) != len(set(non_roots))


@given(st.integers(1, 60), st.integers(0, 10**6))
@settings(max_examples=80, derandomize=True, deadline=None)
def test_chains_are_found_where_nothing_branches_and_nowhere_else(length: int, seed: int) -> None:
    end = random_tree(length, seed)
    chains = find_chains(end)
    assert (chains is None) == branches(end[0])
    cuts = torch.randint(0, 2, (2, length), generator=torch.Generator().manual_seed(seed)).bool()
    cuts[:, -1] = True
    # cuts 0 0 1 0 1 -> chains that end after tokens 2 and 4 -> subtree_end 3 3 3 5 5
    runs = torch.stack([torch.tensor([i + 1 + int(row[i:].nonzero()[0]) for i in range(length)]) for row in cuts])
    chains = find_chains(runs)
    assert chains is not None
    assert chains.offsets.tolist() == [0, *(cuts.flatten().nonzero().squeeze(-1) + 1).tolist()]
    assert chains.longest == int(chains.offsets.diff().max())


def test_a_long_chain_beside_many_short_ones_is_left_to_the_tree_kernel() -> None:
    # 5,000 tokens in one chain are 40 tiles; with 1,000 chains of one token, 40,040 launches for 1,040 tiles.
    end = torch.cat([torch.full((5000,), 5000), torch.arange(5001, 6001)])[None]
    assert not branches(end[0, 4990:5010] - 4990)
    assert find_chains(end) is None


@pytest.mark.usefixtures("hopper")
def test_auto_gives_rows_without_branches_to_varlen_where_that_can_run_and_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert takes_chains(GPU, torch.bfloat16, (48, 48))
    for dtype, dims in ((torch.float32, (48, 48)), (torch.bfloat16, (192, 128)), (torch.float16, (36, 36))):
        assert not takes_chains(GPU, dtype, dims)
    assert not takes_chains(GPU, torch.bfloat16, (128, 128)), "the Hopper kernels are faster"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    has_hopper.cache_clear()
    assert takes_chains(GPU, torch.bfloat16, (128, 128))
    assert not takes_chains(CPU, torch.bfloat16, (128, 128))
    assert isinstance(prepare(torch.full((9,), 9), "triton", varlen=True), ChainRows)
    assert not isinstance(prepare(torch.full((9,), 9), "triton"), ChainRows)
    assert not isinstance(prepare(comb(3, 2, 2), "triton", varlen=True), ChainRows)


def test_chain_attention_hands_varlen_what_it_expects() -> None:
    def varlen(q: Tensor, k: Tensor, v: Tensor, at: Tensor, at_k: Tensor, most: int, *more: Any, **options: Any) -> Any:
        """Stand in for the operator of a GPU: causal attention inside each sequence of [tokens, heads, D]."""
        assert torch.equal(at, at_k)
        assert int(at.diff().max()) == most
        assert more == (most, 0.0, True, False)
        parts = []
        for first, last in zip(at[:-1].tolist(), at[1:].tolist(), strict=True):
            a, b, c = (x[first:last].transpose(0, 1) for x in (q, k, v))
            out = scaled_dot_product_attention(a, b, c, is_causal=True, scale=options["scale"], enable_gqa=True)
            parts.append(out.transpose(0, 1))
        none = torch.empty(0)
        return torch.cat(parts), none, none, none, none

    end = torch.stack([torch.tensor([3] * 3 + [11] * 8), torch.tensor([6] * 6 + [10] * 4 + [11])])
    q, k, v, _ = (x.detach() for x in inputs(11, torch.float64))
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("_flash_attention_forward", varlen, "CPU")
    chains = find_chains(end)
    assert chains is not None
    out = chain_attention(q, k, v, chains, scale=0.3)
    library._destroy()
    torch.testing.assert_close(out, reference_attention(q, k, v, end, scale=0.3))
    assert out.transpose(1, 2).is_contiguous()
