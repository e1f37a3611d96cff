"""Sequences one after another in a row, as others train on them: the flat side of benchmarks.

    fla_convolve, fla_scan      convolution and scan of flash-linear-attention with cu_seqlens
    FlatModel                   a model of transformers with these, and with varlen FlashAttention
    flash_attention_4           varlen FlashAttention-4 instead of torch's, if it is installed

`FlatModel` gives the sequences to transformers' own layers through their own arguments (cu_seq_lens_q), without
subtree_end. These kernels do not run on the CPU, so there it calls transformers' functions in plain torch for one
sequence after the other: the slow twin, for dry runs.

flash-linear-attention refuses the backward of its gated kernels on Hopper with Triton 3.4 to 3.7.0, which compile one
of them to wrong gradients. `refusal_lifted` lets it run, for times only. `fewer_shapes` shortens its tuning.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.compiler import disable
from torch.nn.functional import scaled_dot_product_attention

from treepack.attention import dispatch
from treepack.attention.chains import ChainRows
from treepack.data.batch import Batch
from treepack.model.head.output_head import head_replaced
from treepack.model.head.token_loss import CHUNK, weighted_nll
from treepack.model.loaded import LoadedModel

ATTENTION = "flat_sequences"  # its name in transformers


def fla_convolve(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, bounds: Tensor) -> Tensor:
    """Return the convolutions [1, T, C] of sequences; x is [1, T, C], bounds int64 [n + 1]."""
    convolve: Any = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
    out: Tensor = convolve(x, weight, bias, activation=activation, cu_seqlens=bounds)[0]
    return out


def fla_scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, bounds: Tensor) -> Tensor:
    """Return the outputs [1, T, H, V] of sequences: the gated delta rule, which normalises q and k, or Mamba-2.

    Args:
        q, k: [1, T, Hk, K].
        v: [1, T, H, V].
        g: float32 [1, T, H].
        beta: [1, T, H]; None for Mamba-2.
        bounds: int64 [n + 1], first token of each sequence, then T.
    """
    if beta is None:
        scan: Any = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        options: dict[str, Any] = {"scale": 1.0}
    else:
        scan = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        options = {"beta": beta, "use_qk_l2norm_in_kernel": True}
    out: Tensor = scan(q, k, v, g=g, cu_seqlens=bounds, **options)[0]
    return out


@contextmanager
def refusal_lifted(wanted: bool) -> Iterator[None]:
    """Let flash-linear-attention run kernels that it refuses on this GPU with this Triton, if `wanted`."""
    if not wanted:
        yield
        return
    module: Any = importlib.import_module("fla.ops.common.chunk_o")
    before, module.TRITON_ABOVE_3_7_1 = module.TRITON_ABOVE_3_7_1, True
    try:
        yield
    finally:
        module.TRITON_ABOVE_3_7_1 = before


def fewer_shapes(most: int) -> int:
    """Leave each kernel of flash-linear-attention at most `most` of the shapes that it tries; return their number.

    A kernel with more of them keeps the shapes of 4 warps, Triton's own choice, and of many the ones at even distances.
    """
    from triton.runtime.autotuner import Autotuner

    for name in ("fla.ops.gated_delta_rule", "fla.ops.simple_gla", "fla.modules.causal_conv1d"):
        importlib.import_module(name)
    tuners: dict[int, Any] = {}
    for module in [each for name, each in sys.modules.items() if name.startswith("fla.") and each is not None]:
        for value in vars(module).values():
            kernel: Any = value
            while kernel is not None and not isinstance(kernel, Autotuner):  # perhaps in a wrapper
                kernel = vars(kernel).get("fn") if hasattr(kernel, "__dict__") else None
            if kernel is not None:
                tuners[id(kernel)] = kernel
    for tuner in tuners.values():
        if len(tuner.configs) > most:
            shapes = [each for each in tuner.configs if each.num_warps == 4] or tuner.configs
            # 9 shapes, most 2 -> 0 and 4
            tuner.configs = [shapes[i * len(shapes) // most] for i in range(most)] if len(shapes) > most else shapes
    return most


@contextmanager
def flash_attention_4() -> Iterator[bool]:
    """Inside, sequences go through FlashAttention-4 if it is installed; yields True then."""
    module: Any = dispatch
    original = module.chain_attention
    try:
        attend: Any = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    except ImportError:
        yield False
        return

    def run(query: Tensor, key: Tensor, value: Tensor, chains: ChainRows, *, scale: float | None = None) -> Tensor:
        sequences = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
        limits = {"cu_seqlens_q": chains.offsets, "cu_seqlens_k": chains.offsets,
                  "max_seqlen_q": chains.longest, "max_seqlen_k": chains.longest}  # fmt: skip
        result = attend(*sequences, **limits, causal=True, softmax_scale=scale)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out.view(chains.rows, chains.length, *out.shape[1:]).transpose(1, 2)

    module.chain_attention = run
    try:
        yield True
    finally:
        module.chain_attention = original


class FlatModel:
    """A loaded model that computes the sequences of flat rows, inside `with flat.active():`."""

    def __init__(self, loaded: LoadedModel) -> None:
        """Register the attention, and find the functions that the model's layers call."""
        from transformers import AttentionInterface, AttentionMaskInterface

        self.loaded = loaded
        self._bounds = torch.zeros(1, dtype=torch.int64)  # of the row in work
        # A compiled layer breaks its graph here, because these functions are launched and not traced.
        AttentionInterface.register(ATTENTION, disable(self._attend))  # type: ignore[no-untyped-call]
        AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)
        replaced = {"causal_conv1d_fn": self._convolve, "torch_chunk_gated_delta_rule": self._scan}
        names = {type(layer).__module__ for layer in loaded.causal.modules()}
        modules = [sys.modules[name] for name in sorted(names) if name.startswith("transformers.models.")]
        self._functions = [
            (module, name, function, disable(function))  # type: ignore[no-untyped-call]
            for module in modules
            for name, function in replaced.items()
            if hasattr(module, name)
        ]
        self._plain: dict[str, Callable[..., Any]] = {
            name: inspect.unwrap(getattr(module, name)) for module, name, _, _ in self._functions
        }

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the model compute sequences instead of trees; forward and backward both run inside."""
        causal = self.loaded.causal
        attention = causal.config.get_text_config()._attn_implementation
        before = [(module, name, getattr(module, name)) for module, name, _, _ in self._functions]
        causal.set_attn_implementation(ATTENTION)
        for module, name, _, function in self._functions:
            setattr(module, name, function)
        try:
            yield
        finally:
            causal.set_attn_implementation(attention)
            for module, name, function in before:
                setattr(module, name, function)

    def loss(self, row: Batch) -> Tensor:
        """Return the sum of loss_weight * nll over a row on the model's device, as `forward.row_loss` does."""
        bounds = [0, *(row.trajectory_ends + 1).tolist()]
        longest = max(b - a for a, b in itertools.pairwise(bounds))
        self._bounds = torch.tensor(bounds, device=row.input_ids.device)
        offsets = self._bounds.to(torch.int32)
        with head_replaced(
            self.loaded.causal, lambda states, layer: weighted_nll(states, layer, row.targets, chunk=CHUNK)
        ) as call:
            self.loaded.model(
                input_ids=row.input_ids[None],
                position_ids=row.position_ids[None],
                cu_seq_lens_q=offsets,
                cu_seq_lens_k=offsets,
                max_length_q=longest,
                max_length_k=longest,
                use_cache=False,
            )
        loss: Tensor = call.result
        return loss

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, **options: Any
    ) -> tuple[Tensor, None]:
        kind = query.device.type
        if torch.is_autocast_enabled(kind):
            lower = torch.get_autocast_dtype(kind)
            query, key, value = query.to(lower), key.to(lower), value.to(lower)
        scale, offsets = options.get("scaling"), options["cu_seq_lens_q"]
        if kind == "cuda":
            attention: Any = dispatch  # whose function `flash_attention_4` may have replaced
            chains = ChainRows(1, query.shape[2], offsets, options["max_length_q"])
            out = attention.chain_attention(query, key, value, chains, scale=scale)
        else:
            causal: Any = functools.partial(scaled_dot_product_attention, is_causal=True, scale=scale, enable_gqa=True)
            pairs = itertools.pairwise(offsets.tolist())
            out = torch.cat([causal(*(x[:, :, a:b] for x in (query, key, value))) for a, b in pairs], 2)
        return out.transpose(1, 2).contiguous(), None

    def _convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
    ) -> Tensor:
        if x.is_cuda:
            return fla_convolve(x.mT, weight, bias, activation, self._bounds).mT
        function = self._plain["causal_conv1d_fn"]
        pairs = itertools.pairwise(self._bounds.tolist())
        return torch.cat([function(x[:, :, a:b], weight, bias, activation) for a, b in pairs], 2)

    def _scan(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
    ) -> tuple[Tensor, None]:
        if value.is_cuda:
            return fla_scan(query, key, value, g, beta, self._bounds), None
        function = self._plain["torch_chunk_gated_delta_rule"]
        outs = [
            function(*(x[:, a:b] for x in (query, key, value, g, beta)), use_qk_l2norm_in_kernel=True)[0]
            for a, b in itertools.pairwise(self._bounds.tolist())
        ]
        return torch.cat(outs, 1), None
