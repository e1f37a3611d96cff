"""Recurrent layers of transformers' models on trees: functions of their modules are replaced.

    enter(model)                     calls with `subtree_end` go to `interface`, all others to the function as it was
    with plain_functions(model)      the functions of transformers in plain torch, even if a faster package is installed

A model calls its convolution and its scan as functions of its module, modeling_qwen3_next.torch_chunk_gated_delta_rule
for example, and passes its keyword arguments to them. transformers wraps these functions: if flash-linear-attention,
mamba-ssm or causal-conv1d is installed, the wrapper calls it instead, and drops the arguments that it does not take.
The package `kernels` adds another wrapper. So the functions are replaced in the module, which changes the
calls of all models of this module and of no other.
"""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import nn
from torch.compiler import disable

from treepack.errors import TreepackError
from treepack.recurrent.interface import (
    convolution,
    gated_delta_rule,
    no_fused_scan,
    state_space_scan,
)

_ON_TREES: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolution,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "mamba2_chunk_scan": state_space_scan,
    "mamba2_split_conv1d_scan_combined": no_fused_scan,
}
_ATTENTION = "ALL_ATTENTION_FUNCTIONS"  # transformers' table of them, which every attention reads
_GLOBAL = "LOAD_GLOBAL"  # the instruction that reads a name of the module
# transformers calls functions of its modules from 5.17 on, and passes the caller's arguments to them from 5.22 on.
_VERSION = "5.22"


def upgrade_hint() -> str | None:
    """Return the remedy for layers that get no arguments, if the installed transformers is too old; else None."""
    version = importlib.import_module("transformers").__version__
    # "5.9.0.dev0" -> [5, 9]
    installed, needed = ([int(each) for each in v.split(".")[:2]] for v in (version, _VERSION))
    return f"install transformers {_VERSION} or later ({version} is installed)" if installed < needed else None


def model_obstacle(config: Any) -> str | None:
    """Return why the recurrent layers of a model cannot be computed on trees; None if they can.

    Args:
        config: the configuration of a text model of transformers.
    """
    # transformers.models.lfm2.configuration_lfm2 -> transformers.models.lfm2.modeling_lfm2
    name = type(config).__module__.replace("configuration_", "modeling_")
    try:
        module = importlib.import_module(name)
    except ImportError:
        return _with_hint("has no code in this version of transformers")
    if not _called_functions(module) & _ON_TREES.keys():
        return _with_hint(
            "carries a state from token to token in a way that this version of transformers offers no function for"
        )
    return None


def _with_hint(reason: str) -> str:
    hint = upgrade_hint()
    return reason if hint is None else f"{reason}; {hint}"


def _called_functions(module: ModuleType) -> set[str]:
    """Return the names of functions of the module that the forward passes of its layers call.

    A layer that keeps a function in one of its attributes, as in early versions of transformers, does not count.
    """
    layers = [each for each in vars(module).values() if inspect.isclass(each) and issubclass(each, nn.Module)]
    names: set[str] = set()
    for layer in layers:
        if layer.__module__ == module.__name__:
            names |= _globals_of(layer)
    return names


def _globals_of(layer: type[nn.Module]) -> frozenset[str]:
    """Return the names of its module that the forward pass of a layer reads."""
    code = dis.get_instructions(inspect.unwrap(layer.forward))
    return frozenset(each.argval for each in code if each.opname == _GLOBAL)


def recurrent_modules(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model whose forward passes call functions on trees, in order."""
    modules = list(model.modules())
    classes = {each for each in {type(module) for module in modules} if _globals_of(each) & _ON_TREES.keys()}
    return [module for module in modules if type(module) in classes]


def is_recurrent(layer: nn.Module) -> bool:
    """Return True if a layer of a model calls functions on trees and no attention; its graph breaks at them."""
    return bool(recurrent_modules(layer)) and not any(_ATTENTION in _globals_of(type(each)) for each in layer.modules())


def enter(model: nn.Module) -> None:
    """Replace the functions in the modules of the model's layers; a second call changes nothing."""
    for module in _modules(model):
        for name, on_trees in _ON_TREES.items():
            original = getattr(module, name, None)
            if original is not None and not hasattr(original, "treepack_original"):
                setattr(module, name, _with_trees(original, on_trees))


def _with_trees(original: Callable[..., Any], on_trees: Callable[..., Any]) -> Callable[..., Any]:
    # A compiled model breaks its graph here, because kernels are launched and not traced.
    uncompiled = disable(on_trees)  # type: ignore[no-untyped-call]

    @functools.wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        function = original if options.get("subtree_end") is None else uncompiled
        return function(*arguments, **options)

    call.treepack_original = original  # type: ignore[attr-defined]
    return call


@contextmanager
def plain_functions(model: nn.Module) -> Iterator[None]:
    """Let the model call transformers' functions in plain torch inside the block, not a package that replaces them.

    This changes the calls of all models of its class, so no other thread should train one of them meanwhile.
    """
    before = [
        (module, name, vars(module)[name]) for module in _modules(model) for name in _ON_TREES if hasattr(module, name)
    ]
    inside = [(module, name, _in_torch(function)) for module, name, function in before]
    for module, name, function in inside:
        setattr(module, name, function)
    try:
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


def _in_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function in plain torch inside the wrappers of treepack, transformers and the package `kernels`.

    Raises:
        TreepackError: if `kernels` wraps functions in another way than the versions that are known.
    """
    inner: Callable[..., Any] = inspect.unwrap(function)
    if not isinstance(inner, nn.Module):
        return inner
    # `kernels` makes a module of a function, which stays a variable of the module's forward method.
    wrapped = inspect.getclosurevars(type(inner).forward).nonlocals.get("func")
    if wrapped is None:
        raise TreepackError(
            "recurrent layer: the package kernels hides the function in plain torch; set "
            "USE_HUB_KERNELS=0 in the environment"
        )
    return _in_torch(wrapped)


def _modules(model: nn.Module) -> list[ModuleType]:
    """Return the modules of transformers that define the layers of the model."""
    # FSDP2 gives layers a new class, below the one of transformers.
    classes = {base for layer in model.modules() for base in type(layer).__mro__}
    names = sorted({each.__module__ for each in classes if each.__module__.startswith("transformers.models.")})
    return [sys.modules[name] for name in names]
