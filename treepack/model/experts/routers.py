"""Routers of mixtures of experts, followed so that other code can record or set the experts that they choose.

    follow_routers(causal) --> [Switch, ...]      one per router, in the order of the layers
    switch.set("carry", make_mode)                each forward of the router runs in a mode that make_mode() returns
    switch.set("carry", None)                     the router chooses again

A router is a module with a method that calls `torch.topk`, or the sparsemixer of PhiMoE, which takes the `max` along a
dimension twice. The method is `forward`, or `route_tokens_to_experts` of a whole mixture (GLM-4.5, Hunyuan and
DeepSeek-V3 in transformers 5.10). `carry.routes` repeats choices within a row, and `model.experts.replay` sets the
experts that a sampler recorded. Both may be active: a replayed choice is then recorded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler at once

from treepack.errors import TreepackError
from treepack.model.layers import find_decoder

# Methods that may choose, and functions whose call in one of them makes a module a router. PhiMoE has sparsemixer.
_METHODS = ("forward", "route_tokens_to_experts")
_CHOICES = frozenset({"topk", "sparsemixer"})
TOPK = (torch.topk, Tensor.topk)
# Modes in the order in which they are entered: the last one sees a call first.
_ORDER = ("replay", "carry")


# Returns a torch function mode with a method `finish(router)`, which checks after the call that the choice was seen,
# and with `hides_choices`, True if it never calls the functions that choose.
_MakeMode: TypeAlias = Callable[[], Any]


class _RouterSwitch:
    """The modes in which a router runs."""

    def __init__(self, router: nn.Module) -> None:
        """Let the router choose without a mode."""
        self.router = router
        self._makers: dict[str, _MakeMode] = {}

    def set(self, name: str, make: _MakeMode | None) -> None:
        """Run the router in a mode that `make` returns for each call; None removes the mode `name`."""
        assert name in _ORDER
        self._makers.pop(name, None)
        if make is not None:
            self._makers[name] = make

    def modes(self) -> list[Any]:
        """Return new modes for one call of the router, in the order in which they are entered."""
        return [self._makers[name]() for name in _ORDER if name in self._makers]


def follow_routers(causal: Any, option: str = "--carry") -> list[_RouterSwitch]:
    """Return the switch of each router of a model of transformers; a second call changes nothing.

    As long as no mode is set, the choices of a router do not change, but a compiled layer now breaks its graph at its
    router. So call this before the first step if equal bits matter.

    Raises:
        TreepackError: some layers with experts have no router that could be followed; the remedy is to omit `option`.
    """
    decoder = find_decoder(causal)
    modules = [] if decoder is None else list(decoder.modules())
    routers = [(module, method) for module in modules if (method := _method_of(module))]
    num_experts = sum(has_experts(module) for module in modules)
    if len(routers) < num_experts:
        raise TreepackError(
            f"{option.strip('-')}: {type(causal).__name__} has {num_experts} layers with experts, and {len(routers)} "
            "routers that call torch.topk, so a second forward pass might choose other experts; train this model "
            f"without {option}"
        )
    return [_follow(router, method) for router, method in routers]


def _method_of(module: nn.Module) -> str | None:
    """Return the name of the method with which a module chooses experts, None if it does not."""
    if type(module).__name__.endswith("Indexer"):  # indexers call topk too, but they do not run under tree attention
        return None
    return next((name for name in _METHODS if _names_in(module, name) & _CHOICES), None)


def _names_in(module: nn.Module, method: str) -> frozenset[str]:
    """Return the names that a method of a module's class uses."""
    function = getattr(type(module), method, None)
    code = None if function is None else getattr(inspect.unwrap(function), "__code__", None)
    return frozenset() if code is None else frozenset(code.co_names)


def chooses_one_by_one(router: nn.Module) -> bool:
    """Return True if a router takes one maximum after another, so that the order of its experts matters."""
    method = _method_of(router)
    return method is not None and "topk" not in _names_in(router, method)


def has_experts(module: nn.Module) -> bool:
    """Return True if a module has stacked weights of experts, [E, N, K]."""
    size = getattr(module, "num_experts", 0)
    return any(x.ndim == 3 and len(x) == size for x in module.parameters(recurse=False))


def _follow(router: nn.Module, method: str) -> _RouterSwitch:
    """Put a switch in front of the method that chooses, or return the one that is there."""
    there = getattr(router.__dict__.get(method), "switch", None)
    if there is not None:
        assert isinstance(there, _RouterSwitch)
        return there
    switch, choose = _RouterSwitch(router), getattr(router, method)

    # A compiled layer breaks its graph here, because its modes change from pass to pass.
    @_disable_dynamo
    def follow(*arguments: Any, **options: Any) -> Any:
        modes = switch.modes()
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            result = choose(*arguments, **options)
        # A mode that repeats choices hides them from the modes outside of it.
        for mode in modes[-1:] if modes and modes[-1].hides_choices else modes:
            mode.finish(router)
        return result

    switched: Any = follow
    switched.switch = switch
    setattr(router, method, switched)
    return switch


def scores_of(args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Return the first argument of a call of `topk` or `max`."""
    scores: Tensor = args[0] if args else kwargs["input"]
    return scores
