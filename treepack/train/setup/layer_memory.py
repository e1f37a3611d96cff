"""Memory of a model's layers between the forward and the backward pass of a row, on the GPU and on the host.

model, a short row --measure_layers--> LayerBytes: bytes per token of a layer, kept or recomputed
model --measure_pass--> bytes of a forward and backward pass: fixed ones, and the bytes of each token
LayerBytes, longest row, free bytes --fewest_recomputed--> number of layers to recompute
model, longest row --host_pages--> pages of host memory for `offload`
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from treepack.data.batch import Batch, empty_batch
from treepack.errors import TreepackError
from treepack.memory.device_memory import MemoryMeter, gpu_meter
from treepack.memory.host_pages import PAGE
from treepack.model.experts.weights import cast_once
from treepack.model.forward import hidden_states, prepare_batch
from treepack.model.layers import adapted_layers, find_layers, recomputed_layers
from treepack.model.loaded import LoadedModel

# Tokens of the row that is measured: all activations of them fit beside a large model, about 55 GB for 32 billion
# weights and 19 GB for 8 billion, without compilation.
MEASURED_TOKENS = 2048
# Tokens of the passes: the difference of the last two gives the bytes of a token. A first pass compiles and makes
# gradients, so it does not count.
_PASSES, _FIRST_PASSES = (1024, 1024, 3072), (64, 64, 128)
_CHAIN = 64  # tokens of each of their sequences


@dataclass(frozen=True)
class LayerBytes:
    """Bytes on the device for each token of a row.

    kept            of a layer that keeps its activations until its backward pass, the mean over all layers
    recomputed      of a layer that runs again, the mean over all layers
    working         of the backward pass of one recomputed layer: its activations and their gradients
    """

    kept: float
    recomputed: float
    working: float

    def of_token(self, num_layers: int, recomputed: int) -> float:
        """Return the largest number of bytes for one token, if the first `recomputed` layers of a model run again."""
        # The backward pass starts with a layer that keeps its activations, if there is one. Then only the gradients of
        # these are new: 28 layers, 20 recomputed -> 20 r + 8 k + (w - k), and with all recomputed 28 r + w.
        gradients = max(0.0, self.working - self.kept)
        kept = num_layers - recomputed
        return recomputed * self.recomputed + max(kept, 1) * self.kept + gradients


def measure_layers(
    loaded: LoadedModel,
    batch: Batch,
    *,
    lower: bool,
    num_tokens: int = MEASURED_TOKENS,
    meter: MemoryMeter | None = None,
) -> LayerBytes:
    """Measure the layers' memory by forward and backward passes over the first tokens of a row.

    Call `adapt_layers` with `checkpointing` first. Weights, gradients and random generators are as
    before in the end.

    Args:
        loaded: the model.
        batch: any row.
        lower: True if the run computes under autocast in bfloat16.
        num_tokens: number of tokens to run, or all of a shorter row.
        meter: the memory to measure, by default that of the model's GPU.

    Raises:
        TreepackError: the model is on a CPU (torch counts only the memory of GPUs), or sharded over ranks.
    """
    if loaded.root is not None or (meter is None and loaded.device.type != "cuda"):
        raise TreepackError("the memory of layers is measured in one process on a GPU; give a number instead of auto")
    adapted = adapted_layers(loaded.causal)
    assert adapted is not None, "call adapt_layers with checkpointing first"
    meter, count = meter or gpu_meter(loaded.device), len(adapted.modules)
    row = prepare_batch(loaded, first_tokens(batch, num_tokens))
    tokens = len(row.input_ids)
    # Gradients exist beforehand, so that they count neither in the forward nor in the backward pass.
    empty = [p for p in loaded.model.parameters() if p.requires_grad and p.grad is None]
    for parameter in empty:
        parameter.grad = torch.zeros_like(parameter)
    training = loaded.model.training
    loaded.model.train()
    devices = [loaded.device] if loaded.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), cast_once():
            _pass(loaded, row, count, lower, meter)  # compiles
            kept, _ = _pass(loaded, row, 0, lower, meter)
            recomputed, working = _pass(loaded, row, count, lower, meter)
    finally:
        loaded.model.train(training)
        for parameter in empty:
            parameter.grad = None
    return LayerBytes(kept / count / tokens, recomputed / count / tokens, working / tokens)


def measure_pass(
    loaded: LoadedModel,
    *,
    autocast: Callable[[], AbstractContextManager[Any]],
    all_have: Callable[[int], bool] | None = None,
    meter: MemoryMeter | None = None,
) -> tuple[int, float]:
    """Measure the memory that forward and backward passes of the layers, as they are adapted, need beside the weights.

    All ranks of a sharded model must call this. Gradients are None in the end, and random generators as before.

    Args:
        loaded: the model.
        autocast: makes the context of a forward pass.
        all_have: called before each longer pass with the bytes that it will need; if it returns False, the passes so
            far must do. If it is given, the first passes have few tokens.
        meter: the memory to measure, by default that of the model's GPU.

    Returns:
        the bytes of a pass without tokens, and the bytes of each token.
    """
    meter, training = meter or gpu_meter(loaded.device), loaded.model.training
    loaded.model.train()
    devices = [loaded.device] if loaded.device.type == "cuda" else []
    peaks: dict[int, int] = {}  # of the last pass of each length
    try:
        with torch.random.fork_rng(devices=devices), cast_once():
            for length in _PASSES if all_have is None else (*_FIRST_PASSES, *_PASSES):
                if all_have is not None and len(peaks) > 1 and length not in peaks:
                    fixed, per_token = _line(peaks)
                    if not all_have(int(fixed + length * per_token)):
                        break
                row = prepare_batch(loaded, _chains(length))
                before = meter.allocated()
                meter.reset()
                with autocast():
                    states = loaded.compute(partial(hidden_states, loaded, row))
                torch.autograd.backward(states, torch.zeros_like(states))
                del states
                peaks[length] = meter.peak() - before
    finally:
        loaded.model.train(training)
        loaded.model.zero_grad(set_to_none=True)
    return _line(peaks)


def _line(peaks: dict[int, int]) -> tuple[int, float]:
    """Return the bytes without tokens and the bytes of each token, from the peaks of the two longest passes."""
    # {1024: 2_048_000, 3072: 4_096_000} -> 1000 for each token, and 1_024_000 without tokens
    short, long = sorted(peaks)[-2:]
    per_token = max(1.0, (peaks[long] - peaks[short]) / (long - short))
    return max(0, int(peaks[short] - short * per_token)), per_token


def _chains(length: int) -> Batch:
    """Return a row of sequences of `_CHAIN` tokens, whose positions every model has."""
    # Length 6 in sequences of 3: positions [0 1 2 0 1 2], subtree_end [3 3 3 6 6 6]
    tokens = torch.arange(length)
    end = ((tokens // _CHAIN + 1) * _CHAIN).clamp(max=length).int()
    return replace(empty_batch(length), position_ids=tokens % _CHAIN, subtree_end=end, num_tokens=length)


def _pass(loaded: LoadedModel, row: Batch, recomputed: int, lower: bool, meter: MemoryMeter) -> tuple[int, int]:
    """Return the bytes that a forward pass leaves for its backward pass, and the bytes that the backward pass adds."""
    before = meter.allocated()

    def forward() -> Tensor:
        with torch.autocast(loaded.device.type, torch.bfloat16, enabled=lower):
            return hidden_states(loaded, row)

    with recomputed_layers(loaded.causal, recomputed):
        states = forward()
        after = meter.allocated()
        meter.reset()
        # Not the embeddings, whose whole gradient is larger than the activations of so few tokens.
        table = loaded.causal.get_input_embeddings().weight
        inputs = [p for p in loaded.model.parameters() if p.requires_grad and p is not table]
        torch.autograd.backward(states, torch.zeros_like(states), inputs=inputs)
    return max(0, after - before), max(0, meter.peak() - after)


def first_tokens(batch: Batch, count: int) -> Batch:
    """Return a row of the first `count` tokens of a row, without terms and routes; a row may be cut anywhere."""
    count = min(count, len(batch.input_ids))
    # Tokens are in depth-first order, so each parent is there: subtree_end [5 3 3 5 5], count 4 -> [4 3 3 4]
    columns: dict[str, Any] = {
        name: getattr(batch, name)[:count] for name in ("input_ids", "position_ids", "parent", "scale", "loss_weight")
    }
    end = batch.subtree_end[:count].clamp(max=count)
    size = min(count, batch.num_tokens)
    return replace(batch, **columns, subtree_end=end, num_tokens=size, terms=None, schedule=None, routes=None)


def fewest_recomputed(layer: LayerBytes, num_layers: int, num_tokens: int, room: float) -> int:
    """Return the smallest number of recomputed layers with which a row fits into `room` bytes; all if none does."""
    fitting = (n for n in range(num_layers) if layer.of_token(num_layers, n) * num_tokens <= room)
    return next(fitting, num_layers)


def head_bytes(causal: Any, *, chunk: int, num_tokens: int) -> int:
    """Return an upper estimate of the bytes that output layer and loss need for a row, beside the layers."""
    size, width = (int(length) for length in causal.get_input_embeddings().weight.shape)
    # Logits of a chunk, their softmax and gradient in float32; the gradient of the output layer, of one chunk and of
    # all, and its weights in 16 bits; hidden states of the row with their gradients in float32.
    return 12 * min(chunk, num_tokens) * size + 10 * size * width + 12 * num_tokens * width


def host_pages(loaded: LoadedModel, num_tokens: int, *, recomputed: int, lower: bool, size: int = PAGE) -> int:
    """Return the pages in which inputs and attention outputs of the first `recomputed` layers of a row wait.

    Args:
        loaded: the model.
        num_tokens: tokens of the row.
        recomputed: number of recomputed layers.
        lower: True if attention computes in bfloat16.
        size: bytes of a page.
    """
    config, num_layers = loaded.causal.config.get_text_config(), len(find_layers(loaded.causal))
    weight = loaded.causal.get_input_embeddings().weight
    tensors = [config.hidden_size * weight.element_size()] * recomputed
    if loaded.attention == "triton":  # the only implementation whose outputs are kept
        item = 2 if lower else weight.element_size()
        heads = config.num_attention_heads
        # In a hybrid model, some layers have no attention: their share of the recomputed ones, rounded up.
        count = -(-len(loaded.kinds) * recomputed // max(1, num_layers))
        for kind in loaded.kinds[:count]:
            tensors += [heads * kind.head_dims[1] * item, heads * 4]  # the output and its log-sum-exp
    return sum(-(-each * num_tokens // size) for each in tensors)
