"""The value head of a critic: a linear layer from a hidden state to the value of that state.

    directory of a model --read_value_head--> its weights, or None
    causal model --add_value_head--> the same with a module `value_head`, and its first weights
    model with a head, without_value_head(...)   the model that transformers, PEFT and safetensors save
    head weights --write_value_head--> DIR/value_head.safetensors, beside the weights of the model

The hidden state at a token gives the value after this token: the expected rest of the return in the state that begins
there. The head reads the same states as the output layer. It computes in float32 outside of autocast, or in float64 if
the states are float64. It is a module of the causal model, so the optimiser, checkpoints and FSDP treat it like the
other weights; but it is saved in a separate file, and the model loads by `from_pretrained` without a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler at once
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from treepack.errors import TreepackError
from treepack.files.model_source import VALUE_FILE, local_source
from treepack.files.remote.hub import is_offline
from treepack.model.head.output_head import find_head

_NAME = "value_head"
# States of which a copy in float32 exists at a time: 0.5 GB with 8,192 numbers each.
_STATES = 16384


class ValueHead(nn.Module):
    """A linear layer from states [., D] to one number, with the weight [1, D] and the bias [1]."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype))

    @_disable_dynamo
    def forward(self, states: Tensor, sources: Tensor) -> Tensor:
        """Return the values [n] of the states [T, D] at the indices `sources` int64 [n], float32 or float64."""
        # Without sources torch.split returns one part of length 0, whose value has a gradient like any other.
        parts = [
            checkpoint(_values, states, each, self.weight, self.bias, use_reentrant=False)
            for each in torch.split(sources, _STATES)
        ]
        return torch.cat(parts)


def _values(states: Tensor, sources: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    with torch.autocast(states.device.type, enabled=False):
        # [T, D] -> [n, D] -> [n, 1] -> [n]
        chosen = states.index_select(0, sources)
        chosen = chosen if chosen.dtype == torch.float64 else chosen.float()
        return linear(chosen, weight.to(chosen.dtype), bias.to(chosen.dtype)).squeeze(-1)


def value_head_of(causal: Any) -> ValueHead | None:
    """Return the value head of a causal model; None if it has none."""
    head: ValueHead | None = causal._modules.get(_NAME)
    return head


@contextmanager
def lent_head(causal: Any, head: ValueHead) -> Iterator[None]:
    """Give a model without a value head this one during the block."""
    causal.add_module(_NAME, head)
    try:
        yield
    finally:
        del causal._modules[_NAME]


def add_value_head(causal: Any, sources: tuple[str, ...], *, random: int | None = None) -> dict[str, Tensor]:
    """Put a value head on a causal model; return the first weights of its parameters `weight` and `bias`.

    They come from the first of `sources` that has a file of them, and are zero without one, so that every value is 0.

    Args:
        causal: a causal language model of transformers, changed in place; also on the meta device.
        sources: model directories, addresses or hub names.
        random: a seed of random weights in place of zeros. While the weight is 0, no gradient reaches the model, so a
            comparison of gradients needs it.

    Raises:
        TreepackError: the file cannot be read, or its weights have a different size.
    """
    output = find_head(causal)
    size = output.in_features
    head = ValueHead(size, torch.promote_types(output.weight.dtype, torch.float32))
    causal.add_module(_NAME, head.to(output.weight.device))
    for source in sources:
        saved = read_value_head(source)
        if saved is not None:
            if list(saved["weight"].shape) != [1, size]:
                raise TreepackError(
                    f"{source}: its {VALUE_FILE} is for states of {saved['weight'].shape[-1]:,} numbers and the model "
                    f"has {size:,}; put the file back that was saved with this model"
                )
            return saved
    if random is None:
        return {"weight": torch.zeros(1, size), "bias": torch.zeros(1)}
    generator = torch.Generator().manual_seed(random)
    bound = size**-0.5
    return {"weight": torch.empty(1, size).uniform_(-bound, bound, generator=generator), "bias": torch.full((1,), 0.1)}


def named_weights(model: nn.Module, causal: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `weights` by the names that the head's parameters have in `model`, which contains `causal`."""
    # "weight" -> "value_head.weight", or "base_model.model.value_head.weight" in a PeftModel
    own = {id(parameter): name for name, parameter in causal._modules[_NAME].named_parameters()}
    return {name: weights[own[id(parameter)]] for name, parameter in model.named_parameters() if id(parameter) in own}


@contextmanager
def without_value_head(causal: Any) -> Iterator[None]:
    """Take the value head off the model during the block, if there is one."""
    head = causal._modules.pop(_NAME, None)
    try:
        yield
    finally:
        if head is not None:
            causal._modules[_NAME] = head  # at the end, where `add_module` put it


def whole_value_head(causal: Any) -> dict[str, Tensor] | None:
    """Return the weights of the head on the CPU, or None; all ranks of a sharded model must call this."""
    from torch.distributed.tensor import DTensor

    head = value_head_of(causal)
    if head is None:
        return None
    weights = {}
    for name, parameter in head.named_parameters():
        tensor = parameter.detach()
        if isinstance(tensor, DTensor):
            # A trainer's FSDP may keep shards on the CPU; ranks gather on the device of their mesh.
            tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
        weights[name] = tensor.cpu().clone()
    return weights


def write_value_head(weights: dict[str, Tensor], directory: Path) -> None:
    """Write the weights of a head into the directory of its model.

    Raises:
        OSError: the disk fails.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(weights, directory / VALUE_FILE, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error


def read_value_head(source: str | Path) -> dict[str, Tensor] | None:
    """Return the weights of the head of a saved model, `weight` [1, D] and `bias` [1]; None if it has no head.

    Args:
        source: a model directory or its address, a hub name, or a config file, which has no head.

    Raises:
        TreepackError: the file is damaged or contains other tensors.
    """
    if str(source).endswith(".json"):
        return None
    local = local_source(source)
    path = Path(local, VALUE_FILE) if Path(local).is_dir() else _hub_file(local)
    if path is None or not path.is_file():
        return None
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise TreepackError(f"{path}: cannot be read ({error}); save the model again, or remove the file") from error
    shapes = {name: tensor.ndim for name, tensor in weights.items()}
    if shapes != {"weight": 2, "bias": 1} or len(weights["weight"]) != 1 or len(weights["bias"]) != 1:
        raise TreepackError(f"{path}: expected the tensors weight [1, D] and bias [1]; save the model again")
    return {name: tensor.float() for name, tensor in weights.items()}


def has_saved_head(source: str | Path) -> bool:
    """Return True if the model in a directory of this machine was saved with a value head."""
    return Path(source, VALUE_FILE).is_file()


def _hub_file(name: str) -> Path | None:
    from transformers.utils import cached_file

    options = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_gated_repo": False}
    with suppress(Exception):  # the weights of the model, which are read too, name a fault of the hub
        path = cached_file(name, VALUE_FILE, local_files_only=is_offline(name), **options)
        return None if path is None else Path(path)
    return None
