"""The implementations that benchmarks/attention.py compares, each as one function that prepares it for a workload.

    Case (workload, heads, inputs) --prepare--> Candidate: forward(), and the inputs of its backward

On the tree [1, H, T, D]:

    triton            treepack's kernels, as `tree_attention(impl="triton")` chooses them
    triton-portable   triton, always the portable ones
    auto              `tree_attention(impl="auto")`, prepared as the trainer does
    flex              FlexAttention, compiled for this shape
    flex-autotune     the same under max-autotune
    flash             FlexAttention's FlashAttention-4 backend, compiled for this shape
    reference         the dense twin; for dry runs

Every path alone, [tokens_flat, H, D]:

    flat-fa2          varlen FlashAttention through torch
    flat-fa4          varlen FlashAttention-4

Masks and schedules are computed before the timing starts, and FlexAttention gets inputs padded to whole blocks.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import pad
from workloads import Workload

from treepack.attention import (
    KeyReach,
    build_block_mask,
    first_visible,
    prepare,
    reference_attention,
    resolve,
    takes_chains,
    tree_attention,
)
from treepack.attention.flash import build_flash_mask
from treepack.attention.flex import flex_attention as tree_flex


@dataclass(frozen=True)
class Heads:
    """Query heads, key heads, and the head dimensions of q and k and of v."""

    query: int
    key: int
    size: int
    size_v: int

    @property
    def text(self) -> str:
        """The heads as text: 32/8 of 128, or 32/32 of 192/128."""
        size = f"{self.size}" if self.size == self.size_v else f"{self.size}/{self.size_v}"
        return f"{self.query}/{self.key} of {size}"


@dataclass(frozen=True)
class Candidate:
    """An implementation on one workload: inputs are leaves, `weight` is the gradient of what `forward` returns."""

    name: str
    note: str
    forward: Callable[[], Tensor]
    inputs: tuple[Tensor, Tensor, Tensor]
    weight: Tensor
    schedule_bytes: int  # of its mask or schedule
    around: Callable[[], AbstractContextManager[None]] = nullcontext  # active during the forward and the backward


class Case:
    """A workload with random inputs on a device.

    end     int32 [1, T], its subtree_end
    start   int32 [1, T], the first token that each token sees; None for all ancestors
    sinks   float32 [query heads], or None
    """

    def __init__(
        self,
        workload: Workload,
        heads: Heads,
        dtype: torch.dtype,
        device: torch.device,
        *,
        tokens_first: bool,
        reach: KeyReach | None = None,
        has_sinks: bool = False,
    ) -> None:
        """Draw query, key, value and the gradient of the output, tokens before heads in memory if `tokens_first`."""
        self.workload, self.heads, self.dtype, self.device = workload, heads, dtype, device
        self.end = torch.tensor(workload.subtree_end, dtype=torch.int32, device=device)[None]
        self.start = first_visible(self.end, reach)
        self.sinks = torch.linspace(-1, 1, heads.query, device=device) if has_sinks else None
        generator = torch.Generator(device).manual_seed(workload.tokens)

        def draw(count: int, size: int) -> Tensor:
            sizes = (1, workload.tokens, count, size) if tokens_first else (1, count, workload.tokens, size)
            made = torch.randn(sizes, generator=generator, device=device, dtype=dtype)
            return made.transpose(1, 2) if tokens_first else made

        self.inputs = (draw(heads.query, heads.size), draw(heads.key, heads.size), draw(heads.key, heads.size_v))
        self.weight = draw(heads.query, heads.size_v)

    def padded(self, total: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Return the inputs as leaves, and the weight, padded with zero tokens to `total`."""
        q, k, v, weight = (pad(x, (0, 0, 0, total - x.shape[2])) for x in (*self.inputs, self.weight))
        return leaves(q, k, v), weight

    @cached_property
    def flat(self) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor, int]:
        """Random inputs of all paths in one sequence [tokens, heads, D], their weight, cu_seqlens, maximum length."""
        paths = torch.tensor(self.workload.paths)
        # paths 5 3 4 -> cu_seqlens 0 5 8 12
        offsets = pad(paths.cumsum(0), (1, 0)).to(self.device, torch.int32)
        made = []
        heads = self.heads
        each = ((heads.query, heads.size), (heads.key, heads.size), (heads.key, heads.size_v))
        for count, size in (*each, (heads.query, heads.size_v)):
            sizes = (self.workload.tokens_flat, count, size)
            made.append(torch.randn(sizes, device=self.device, dtype=self.dtype))
        return leaves(*made[:3]), made[3], offsets, int(paths.max())


def leaves(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three as leaves with gradients; they share the memory of the arguments."""
    return q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_()


def num_bytes(value: Any) -> int:
    """Return the bytes of all tensors in a schedule or block mask."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if hasattr(value, "as_tuple"):
        return num_bytes(value.as_tuple())
    if isinstance(value, list | tuple):
        return sum(map(num_bytes, value))
    if is_dataclass(value):
        return sum(num_bytes(getattr(value, field.name)) for field in fields(value))
    return 0


def mend_interpreter() -> None:
    """Repair Triton's interpreter so that it runs the kernels, as the tests do; TRITON_INTERPRET=1 needs it."""
    folder = str(Path(__file__).parents[1] / "tests")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    importlib.import_module("support.interpreter")


def prepare_triton(case: Case) -> Candidate:
    """Prepare the project's own kernels for this device."""
    from treepack.attention import autograd as kernel

    if case.device.type == "cpu":
        mend_interpreter()
    schedule, inputs = prepare(case.end, "triton", start=case.start), leaves(*case.inputs)
    sinks = None if case.sinks is None else case.sinks.requires_grad_()

    def forward() -> Tensor:
        options: dict[str, Any] = {"schedule": schedule, "start": case.start, "sinks": sinks}
        return tree_attention(*inputs, case.end, impl="triton", **options)

    return Candidate("triton", kernel.backend(inputs[0], inputs[2]), forward, inputs, case.weight, num_bytes(schedule))


@contextmanager
def portable_kernels() -> Iterator[None]:
    """Run the portable kernels on every device while this context is active."""
    from treepack.attention import autograd as kernel

    original = kernel.backend
    kernel.backend = lambda *_, **__: "portable"
    try:
        yield
    finally:
        kernel.backend = original


@contextmanager
def changed(module: str, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a name of a module of the Hopper kernels while this context is active."""
    home = importlib.import_module(f"treepack.attention.hopper.{module}")
    original = getattr(home, name)
    setattr(home, name, change(original))
    try:
        yield
    finally:
        setattr(home, name, original)


def prepare_portable(case: Case) -> Candidate:
    """Prepare the project's own portable kernels."""
    plain = prepare_triton(case)

    return replace(plain, name="triton-portable", note="portable", around=portable_kernels)


def prepare_auto(case: Case) -> Candidate:
    """Prepare the default of the trainer."""
    inputs, size = leaves(*case.inputs), (case.heads.size, case.heads.size_v)
    chosen = resolve("auto", case.device, case.dtype, size)
    schedule = prepare(case.end, chosen, varlen=takes_chains(case.device, case.dtype, size))

    def forward() -> Tensor:
        return tree_attention(*inputs, case.end, impl="auto", schedule=schedule)

    note = f"{chosen}, {type(schedule).__name__}"
    return Candidate("auto", note, forward, inputs, case.weight, num_bytes(schedule))


def prepare_reference(case: Case) -> Candidate:
    """Prepare the dense twin."""
    inputs = leaves(*case.inputs)

    def forward() -> Tensor:
        return reference_attention(*inputs, case.end, start=case.start, sinks=case.sinks)

    return Candidate("reference", "", forward, inputs, case.weight, 0)


def prepare_flex(case: Case, *, name: str = "flex", mode: str | None = None, backend: str = "AUTO") -> Candidate:
    """Prepare FlexAttention, eager on the CPU."""
    mask = build_flash_mask(case.end) if backend == "FLASH" else build_block_mask(case.end, case.start)
    if case.device.type == "cpu":
        # On the CPU the public function has no gradient; the project's own function has one.
        inputs = leaves(*case.inputs)
        return Candidate(name, "eager", lambda: tree_flex(*inputs, case.end, block_mask=mask), inputs, case.weight, 0)
    inputs, weight = case.padded(mask.seq_lengths[0])
    options: dict[str, Any] = {"block_mask": mask, "enable_gqa": case.heads.query != case.heads.key}
    if backend != "AUTO":
        options["kernel_options"] = {"BACKEND": backend}
    compiled: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True, mode=mode)
    return Candidate(name, "", lambda: compiled(*inputs, **options), inputs, weight, num_bytes(mask))


def prepare_autotuned(case: Case) -> Candidate:
    """Prepare FlexAttention with tiles tuned for this shape."""
    return prepare_flex(case, name="flex-autotune", mode="max-autotune-no-cudagraphs")


def prepare_flash(case: Case) -> Candidate:
    """Prepare FlexAttention's FlashAttention-4 backend."""
    return prepare_flex(case, name="flash", backend="FLASH")


def prepare_flat_fa2(case: Case) -> Candidate:
    """Prepare torch's FlashAttention over all paths, one after another."""
    inputs, weight, offsets, longest = case.flat

    def forward() -> Tensor:
        out: Tensor = torch.ops.aten._flash_attention_forward(
            *inputs, offsets, offsets, longest, longest, 0.0, True, False
        )[0]
        return out

    return Candidate("flat-fa2", "", forward, inputs, weight, 0)


def prepare_flat_fa4(case: Case) -> Candidate:
    """Prepare FlashAttention-4 over all paths, one after another."""
    attend: Any = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    inputs, weight, offsets, longest = case.flat
    limits = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": longest, "max_seqlen_k": longest}

    def forward() -> Tensor:
        result = attend(*inputs, **limits, causal=True)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    return Candidate("flat-fa4", "", forward, inputs, weight, 0)


CANDIDATES: dict[str, Callable[[Case], Candidate]] = {
    "triton": prepare_triton,
    "triton-portable": prepare_portable,
    "auto": prepare_auto,
    "flex": prepare_flex,
    "flex-autotune": prepare_autotuned,
    "flash": prepare_flash,
    "flat-fa2": prepare_flat_fa2,
    "flat-fa4": prepare_flat_fa4,
    "reference": prepare_reference,
}
