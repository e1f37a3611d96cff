"""Replay of recorded experts: a mixture routes tokens to the experts that the sampler used.

    Batch.routes [T, layers, k] --use_routes--> the next forward pass, and its backward

A sampler and a trainer compute scores of experts with other kernels, so a token whose scores are nearly equal goes to
other experts, and its probability jumps. Replay takes the experts of the record and the weights of the model's own
router, so gradients still reach the router (arXiv:2510.11370, "R3").

    scores [[.1, .7, .2]], k = 2      chosen      values [.7, .2], experts [1, 2]
    recorded [[1, 0]]                 replayed    values [.7, .1], experts [1, 0]

Only the choice changes: the `topk` of k among all experts becomes a `gather` at the recorded ones. So softmax, bias,
renormalisation and scale come from the model's code. A mask of groups (DeepSeek) does not apply to tokens with
recorded experts, because the sampler may have chosen other groups. If the router would choose the recorded
experts, in their order, then all bits are equal with and without replay.

Experts that were not recorded are k times `missing_expert`; the router chooses for them. `routes` stay in use until the
next forward pass, because layers that are recomputed run their router again in the backward pass.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from treepack.data.batch import is_route_recorded
from treepack.errors import TreepackError
from treepack.model.experts.active import experts_per_token, stacked_experts
from treepack.model.experts.routers import TOPK, chooses_one_by_one, follow_routers, has_experts, scores_of
from treepack.model.layers import find_layers

_REMEDY = "train without them (--routes ignore), or sample again with this model"
# Attribute of a model: its `_RouterReplay`.
_REPLAY = "_treepack_replay"
_MASKS = (torch.masked_fill, Tensor.masked_fill)


class _RouterReplay:
    """The routers of a model, with the layer and the number of experts of each."""

    def __init__(self, causal: Any, source: str) -> None:
        self.switches = follow_routers(causal, "--routes replay")
        self.source, self.num_experts = source, _num_experts(causal)
        layers = find_layers(causal)
        self.num_layers = len(layers)
        modules = [set(layer.modules()) for layer in layers]
        # The layer of each router, or -1 outside of layers: layers 1 and 3 have one -> [1, 3].
        self.places = [next((i for i, own in enumerate(modules) if s.router in own), -1) for s in self.switches]

    def layers_of(self, num_recorded: int) -> list[int]:
        """Return the recorded layer of each router.

        Raises:
            TreepackError: the record has neither one entry per router nor one per layer.
        """
        if num_recorded == len(self.switches):
            return list(range(num_recorded))
        if num_recorded == self.num_layers and len({*self.places, -1}) == len(self.places) + 1:
            return self.places
        raise TreepackError(
            f"{self.source}: has {self.num_layers} layers and {len(self.switches)} routers, but the recorded routes "
            f"have {num_recorded} layers; {_REMEDY}"
        )


def check_routes(causal: Any, source: str, routes: Tensor) -> None:
    """Refuse recorded routes that `causal` cannot replay, and follow its routers from now on.

    Args:
        causal: the model of transformers.
        source: its name in errors.
        routes: uint8 or int16 [T, layers, k], of any number of tokens.

    Raises:
        TreepackError: the model has no routers, other layers, fewer experts, or chooses another number of them.
    """
    replay = _replay_of(causal, source)
    replay.layers_of(routes.shape[1])
    chosen = experts_per_token(causal.config.get_text_config())
    if chosen is not None and chosen != routes.shape[2]:
        raise TreepackError(
            f"{source}: chooses {chosen} experts per token, but the recorded routes have {routes.shape[2]}; {_REMEDY}"
        )
    known = routes[is_route_recorded(routes).expand_as(routes)]
    if known.numel() and (last := int(known.max())) >= replay.num_experts:
        raise TreepackError(
            f"{source}: has {replay.num_experts} experts in a layer, but the recorded routes name expert {last}; "
            f"{_REMEDY}"
        )


def use_routes(causal: Any, source: str, routes: Tensor | None) -> None:
    """Replay `routes`, uint8 or int16 [T, layers, k], in the next forward pass of T tokens; None replays nothing.

    Raises:
        TreepackError: as `check_routes`, without the check of the experts.
    """
    if routes is None:
        if (replay := getattr(causal, _REPLAY, None)) is not None:
            for switch in replay.switches:
                switch.set("replay", None)
        return
    replay = _replay_of(causal, source)
    for switch, layer in zip(replay.switches, replay.layers_of(routes.shape[1]), strict=True):
        switch.set("replay", partial(_ReplayMode, replay, routes[:, layer]))


def _replay_of(causal: Any, source: str) -> _RouterReplay:
    """Return the routers of a model, found at the first call.

    Raises:
        TreepackError: it has none that can be replayed.
    """
    replay: _RouterReplay | None = getattr(causal, _REPLAY, None)
    if replay is not None:
        return replay
    replay = _RouterReplay(causal, source)
    if not replay.switches:
        raise TreepackError(f"{source}: has no routers, but the rows have recorded routes; give --routes ignore")
    one_by_one = next((s.router for s in replay.switches if chooses_one_by_one(s.router)), None)
    if one_by_one is not None or not replay.num_experts:
        name = type(one_by_one or replay.switches[0].router).__name__
        raise TreepackError(f"{source}: its {name} does not choose k of its experts at once; give --routes ignore")
    setattr(causal, _REPLAY, replay)
    return replay


def _num_experts(causal: Any) -> int:
    """Return the experts of a layer, 0 if they are not known or differ."""
    sizes = {int(module.num_experts) for module in causal.modules() if has_experts(module)}
    if not sizes:
        return stacked_experts(causal.config.get_text_config())
    return sizes.pop() if len(sizes) == 1 else 0


class _ReplayMode(TorchFunctionMode):
    """Replace the choice of a router by the recorded one."""

    hides_choices = False

    def __init__(self, replay: _RouterReplay, routes: Tensor) -> None:
        super().__init__()
        self._replay = replay
        self._is_recorded = is_route_recorded(routes)  # [T, 1]
        self._experts = routes.long()  # [T, k]
        self._chosen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in TOPK and func not in _MASKS:
            return result
        scores = scores_of(args, kwargs)
        # Choices of groups have other shapes, [T, groups, experts of a group] or [T, groups].
        if scores.ndim != 2 or scores.shape[1] != self._replay.num_experts:
            return result
        recorded = self._is_recorded
        if len(scores) != len(recorded):
            raise TreepackError(
                f"{self._replay.source}: routes of {len(recorded)} tokens cannot be replayed for {len(scores)}; run "
                "the backward pass of a row before the forward pass of the next one"
            )
        if func in _MASKS:
            return torch.where(recorded, scores, result)
        own = result.indices
        if own.shape != self._experts.shape:
            raise TreepackError(
                f"{self._replay.source}: chooses {own.shape[1]} experts per token, but the recorded routes have "
                f"{self._experts.shape[1]}; {_REMEDY}"
            )
        self._chosen += 1
        experts = torch.where(recorded, self._experts, own)
        return torch.return_types.topk((scores.gather(1, experts), experts))

    def finish(self, router: nn.Module) -> None:
        """Check that the router made its choice once.

        Raises:
            TreepackError: it did not, so nothing was replayed.
        """
        if self._chosen != 1:
            raise TreepackError(
                f"{self._replay.source}: its {type(router).__name__} made {self._chosen} choices among all experts, so "
                "recorded routes cannot be replayed; give --routes ignore"
            )
