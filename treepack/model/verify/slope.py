"""Compare the slope of the loss along random directions of the weights with the slope that the gradients give.

    w, random direction d    (loss(w + h d) - loss(w - h d)) / 2 h    should equal    sum of gradient * d

A gradient that both packed rows and trajectories alone lack makes no difference between the two: a layer whose
kernel has no backward pass, such as a product with stored quantised weights, stops the gradient of everything before it
on both sides. No other weight needs a gradient of 0 for that, because residual connections pass on the rest.

The loss is the mean nll of one made-up trajectory, computed by the model of transformers itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from treepack.errors import TreepackError
from treepack.model.accept.compatibility import position_limit
from treepack.model.accept.probe import use_attention
from treepack.model.adapters.adapter import initial_weights
from treepack.model.experts.replay import use_routes
from treepack.model.foreign_errors import translate_errors
from treepack.model.loaded import LoadedModel
from treepack.model.stored_weights import prepare_products, stored_kind
from treepack.model.verify.gradients import KeepFloat64

# More tokens round less, and a move sends more of them to other experts, which makes the loss jump.
_NUM_TOKENS = 64
_MAX_NUMBERS = 1_000_000  # of a weight that is moved. A larger one is moved only if it has no gradient
# Lengths of the moves relative to each weight, and the largest relative difference. Weights of an adapter may bend the
# loss within the first step, and float32 rounds the last one, so one of them must agree.
_RULES = {torch.float64: ((1e-4, 1e-5), 1e-3), torch.float32: ((1e-3, 3e-4, 1e-4, 3e-5), 2e-2)}


def check_slope(loaded: LoadedModel, *, seed: int = 0) -> float | None:
    """Refuse a model whose gradients do not give the slope of its loss; return the relative difference.

    None if the model has DoRA, whose gradients take norms for constants, or is in a lower precision. The check puts a
    random B into an adapter, and restores all weights. Gradients are None afterwards.

    Args:
        loaded: a whole model on one device, in float32 or float64, which runs without autocast.
        seed: of a random adapter.

    Raises:
        TreepackError: with both slopes.
    """
    model, dtype = loaded.model, loaded.model.dtype
    is_dora = any(getattr(each, "lora_magnitude_vector", None) for each in model.modules())
    if is_dora or dtype not in _RULES:
        return None
    use_routes(loaded.causal, loaded.source, None)  # the check runs a different row
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with _restored(trained), use_attention(loaded.causal, "eager"), KeepFloat64():
        for name, weight in initial_weights(model, seed, random_b=True).items():
            trained[name].data.copy_(weight)
        error, slope, given = _compare(loaded, trained, *_RULES[dtype])
    if error <= _RULES[dtype][1]:
        return error
    kind = stored_kind(loaded.causal.config)
    layers = "a layer" if kind is None else f"a layer with quantised weights ({kind})"
    raise TreepackError(
        f"{loaded.source}: along a random direction of the trained weights the loss has the slope {slope:.4g}, and the "
        f"gradients give {given:.4g}, so {layers} has no backward pass or a wrong one; {_remedy(loaded)}"
    )


def _remedy(loaded: LoadedModel) -> str:
    if stored_kind(loaded.causal.config) is None:
        return "do not train this model"
    return "give the checkpoint in bf16 of the same model, or read it as whole weights with --dequantize"


def check_stored_slope(loaded: LoadedModel, compute_dtype: torch.dtype, *, seed: int = 0) -> None:
    """Run `check_slope` if the model has quantised weights; its products are in `compute_dtype` afterwards.

    Raises:
        TreepackError: as `check_slope`.
    """
    if stored_kind(loaded.causal.config) is None:
        return
    prepare_products(loaded.causal, loaded.model.dtype)
    check_slope(loaded, seed=seed)
    prepare_products(loaded.causal, compute_dtype)


def _compare(
    loaded: LoadedModel, trained: dict[str, Tensor], steps: tuple[float, ...], tolerance: float
) -> tuple[float, float, float]:
    """Return the largest relative difference over all directions, and its two slopes."""
    loaded.model.zero_grad(set_to_none=True)
    loss = _loss(loaded)
    if loss.requires_grad:  # else no weight has a gradient
        with translate_errors(f"{loaded.source}: a layer has no backward pass", _remedy(loaded)):
            torch.autograd.backward(loss)
    gradients = {name: p.grad for name, p in trained.items() if p.grad is not None and bool(p.grad.any())}
    loaded.model.zero_grad(set_to_none=True)
    small = [name for name in gradients if trained[name].numel() <= _MAX_NUMBERS]
    without = [name for name in trained if name not in gradients]
    generator = torch.Generator().manual_seed(0)
    # The usual size of the slope along such a direction: a single slope may be near 0 by chance.
    usual = math.sqrt(sum(float(gradients[name].norm()) ** 2 * _length(trained[name]) ** 2 for name in small))
    worst = (0.0, 0.0, 0.0)
    for names in filter(None, (small, small, without)):
        # Numbers of variance 1, so that a move of `step` has the length step * |w|
        moves = {name: torch.randn(trained[name].shape, generator=generator) * _length(trained[name]) for name in names}
        moves = {name: move.to(trained[name]) for name, move in moves.items()}
        given = sum(float((gradients[name] * moves[name]).sum()) for name in names if name in gradients)
        found = (math.inf, 0.0, given)
        for step in steps:
            slope = _slope(loaded, {trained[name]: move for name, move in moves.items()}, step)
            found = min(found, (abs(slope - given) / max(abs(slope), abs(given), usual, 1e-300), slope, given))
            if found[0] <= tolerance:
                break
        worst = max(worst, found)
    return worst


def _length(weight: Tensor) -> float:
    """Return the root of the mean square of a weight, at least 0.01, because biases may be 0."""
    return max(float(weight.detach().norm()) / math.sqrt(weight.numel()), 0.01)


def _slope(loaded: LoadedModel, moves: dict[Tensor, Tensor], step: float) -> float:
    """Return the slope of the loss between two moves of `step`, one to each side."""
    before = {weight: weight.detach().clone() for weight in moves}
    losses = []
    for sign in (1, -1):
        for weight, move in moves.items():
            weight.data.copy_(before[weight] + sign * step * move)
        losses.append(
            _loss(loaded).item()
        )  # with a graph: some kernels have no backward pass, and run only without one
    for weight, value in before.items():
        weight.data.copy_(value)
    return (losses[0] - losses[1]) / (2 * step)


def _loss(loaded: LoadedModel) -> Tensor:
    """Return the mean nll of a made-up trajectory, float64."""
    words = loaded.causal.get_input_embeddings()
    size, padding = len(words.weight), getattr(words, "padding_idx", None)
    limit = position_limit(loaded.causal)
    length = _NUM_TOKENS if limit is None else min(_NUM_TOKENS, limit[0])
    ids = torch.arange(1, length + 1, device=loaded.device) * 7919 % size  # as in the probe
    if padding is not None:
        ids = ids[ids != padding]  # its embedding moves the loss, and has no gradient by definition
    logits = loaded.model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return cross_entropy(logits.double(), ids[1:])


@contextmanager
def _restored(weights: dict[str, Tensor]) -> Iterator[None]:
    """Restore weights of an adapter at the end of the block: the check replaces them."""
    before = {name: p.detach().clone() for name, p in weights.items() if ".lora_" in name}
    try:
        yield
    finally:
        for name, value in before.items():
            weights[name].data.copy_(value)
