"""Experts over ranks: each rank has some experts of every layer, and tokens travel to the ranks of their experts.

    4 experts on 2 ranks, a token with experts 0 and 3      rank 0: experts 0 1      rank 1: experts 2 3

    rank 0: its tokens --exchange--> tokens of both ranks with an expert here --its experts--> a sum for each token
    rank 0: its tokens <--exchange-- the sums of both ranks, added

A token travels once to each rank that has some of its experts, with its experts and their weights; the rank adds up its
own experts. The backward pass of an exchange is the opposite exchange. So each rank has the whole gradient of its
experts for all tokens of the group, and no gradient of an expert is sent. A rank without tokens takes part too: every
rank calls each layer equally often.

    share_experts(causal, mesh)       stacked weights [E, ...] become DTensors of which a rank has E / size experts
    with whole_experts(causal):       every rank has all experts, for rows in pieces, whose passes differ between ranks
    sum_over_replicas(causal)         once a step: groups of ranks with the same experts add up their gradients
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed, nn

from treepack.errors import TreepackError
from treepack.model.experts.division import check_share
from treepack.model.experts.lora import runs_ours
from treepack.model.experts.routers import has_experts
from treepack.model.experts.routing import combine_pairs, sort_pairs, spread_tokens
from treepack.sequence.share import sequence_of

_SHARE = "_treepack_share"  # attribute of an experts module
# experts, hidden [U, D], local experts [U, k], weights [U, k], number of pairs --> [U, D]
_LocalExperts = Callable[[Any, Tensor, Tensor, Tensor, int | None], Tensor]


@dataclass
class _ExpertShare:
    """The experts `first` to `first + count` of a layer, which this rank of `size` has.

    `whole` has all experts of each stacked parameter, in the block of `whole_experts`.
    """

    mesh: Any
    size: int
    first: int
    count: int
    whole: dict[str, nn.Parameter] = field(default_factory=dict)

    @property
    def group(self) -> Any:
        """The ranks among which the experts are divided."""
        return self.mesh.get_group(self.mesh.ndim - 1)


def share_of(experts: Any) -> _ExpertShare | None:
    """Return the share that this rank has of a layer's experts; None if it has all of them now."""
    share: _ExpertShare | None = getattr(experts, _SHARE, None)
    return None if share is None or share.whole else share


def expert_weight(experts: Any, name: str) -> Tensor:
    """Return the parameter `name` of the experts that this rank computes."""
    share: _ExpertShare | None = getattr(experts, _SHARE, None)
    if share is not None and name in share.whole:
        return share.whole[name]
    weight: Any = getattr(experts, name)
    own: Tensor = weight.to_local() if share is not None and name in _shared_parameters(experts) else weight
    return own


def _shared_parameters(experts: Any) -> dict[str, nn.Parameter]:
    """Return the parameters of an experts module that have an entry for each expert."""
    parameters = experts.named_parameters(recurse=False)
    return {name: each for name, each in parameters if each.ndim > 1 and len(each) == experts.num_experts}


def share_experts(causal: nn.Module, mesh: Any, source: str) -> set[nn.Parameter]:
    """Keep only this rank's experts of every layer; return the parameters, which FSDP must leave alone.

    Args:
        causal: the model, on any device or on meta; its experts run in treepack's implementation.
        mesh: ranks that divide the experts in the last dimension, and ranks with equal experts in one before it.
        source: its name in errors.

    Raises:
        TreepackError: there are no experts, they cannot be divided, or they run in code of their own.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    size, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    layers: list[Any] = [module for module in causal.modules() if has_experts(module)]
    check_share(0 if not layers else layers[0].num_experts, size, source)
    shared: set[nn.Parameter] = set()
    for experts in layers:
        check_share(experts.num_experts, size, source)
        if not runs_ours(experts):
            raise TreepackError(
                f"{source}: its {type(experts).__name__} cannot run over ranks; leave out --expert-ranks"
            )
        count = experts.num_experts // size
        share = _ExpertShare(mesh, size, rank * count, count)
        for name, parameter in _shared_parameters(experts).items():
            own = parameter.detach()[share.first : share.first + count].clone()
            # A DTensor has no method that makes one without communication, except this one.
            made = DTensor.from_local(own, mesh, placements, run_check=False)
            setattr(experts, name, nn.Parameter(made, requires_grad=parameter.requires_grad))
            shared.add(getattr(experts, name))
        setattr(experts, _SHARE, share)
    return shared


def _shared(causal: nn.Module) -> list[tuple[Any, _ExpertShare]]:
    return [(module, share) for module in causal.modules() if (share := getattr(module, _SHARE, None)) is not None]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sizes = sent, received, group
        return _exchange_rows(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.sizes
        return _exchange_rows(grad, received, sent, group), None, None, None


def _exchange_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    """Send the first sent[0] rows of `x` to rank 0 of the group, and so on; return the rows that arrive, in order."""
    out = x.new_empty(sum(received), *x.shape[1:])
    distributed.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=group)
    return out


def compute_over_ranks(
    experts: Any,
    share: _ExpertShare,
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    compute: _LocalExperts,
    dtype: torch.dtype,
) -> Tensor:
    """Return the weighted sum of the experts of each token, [T, D] in the dtype of `hidden`.

    Args:
        experts: the module.
        share: of this rank.
        hidden: [T, D].
        top_k_index: [T, k].
        top_k_weights: [T, k].
        compute: computes the experts of this rank.
        dtype: of the products, in which tokens and sums travel.
    """
    size, count, group = share.size, share.count, share.group
    owner = top_k_index // count
    # Experts [[0, 3]] of 4 on 3 ranks of 2 -> owner [[0, 1]] -> ranks [[0, 1, none]], where none is 3
    ranks = torch.full((len(hidden), size), size, device=owner.device, dtype=owner.dtype).scatter_(1, owner, owner)
    pairs = (owner[..., None] == torch.arange(size, device=owner.device)).sum((0, 1))
    sizes = torch.stack([(ranks < size).sum(0), pairs], 1)
    arriving = torch.empty_like(sizes)
    distributed.all_to_all_single(arriving, sizes, group=group)
    # One copy to the host for all sizes: tokens and pairs of each rank, [size, 2] twice
    leaving, coming = torch.stack([sizes, arriving]).tolist()
    sent, received = [each[0] for each in leaving], [each[0] for each in coming]
    routing = sort_pairs(ranks, size, num_pairs=sum(sent))

    exchange: Any = _Exchange.apply
    chosen = _exchange_rows(top_k_index[routing.token], sent, received, group) - share.first
    chosen = chosen.masked_fill((chosen < 0) | (chosen >= count), count)
    weights = exchange(spread_tokens(top_k_weights, routing), sent, received, group)
    tokens = exchange(spread_tokens(hidden.to(dtype), routing), sent, received, group)
    sums = compute(experts, tokens, chosen, weights, sum(each[1] for each in coming))
    return combine_pairs(exchange(sums, received, sent, group), routing, hidden.dtype)


@contextmanager
def whole_experts(causal: nn.Module) -> Iterator[None]:
    """Gather all experts on every rank for the block, which runs without exchanges; then add up their gradients.

    Every rank must enter and leave the block, and run a backward pass in it, or none. Without shared experts nothing
    happens, nor if the ranks of the experts compute every row together: their passes are the same.
    """
    sequence = sequence_of(causal)
    layers = [each for each in _shared(causal) if sequence is None or not sequence.includes(each[1].group)]
    try:
        with torch.no_grad():
            for experts, share in layers:
                for name, parameter in _shared_parameters(experts).items():
                    whole = parameter.full_tensor()  # type: ignore[attr-defined]
                    share.whole[name] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        yield
        for experts, share in layers:
            for name, parameter in _shared_parameters(experts).items():
                _add_own_part(share, share.whole.pop(name), parameter)
    finally:
        for _, share in layers:
            share.whole.clear()


@torch.no_grad()
def _add_own_part(share: _ExpertShare, whole: nn.Parameter, parameter: Any) -> None:
    """Add this rank's experts of the gradient of all experts, summed over the group, to that of the parameter."""
    from torch.distributed.tensor import DTensor

    if whole.grad is None:
        return
    distributed.all_reduce(whole.grad, group=share.group)
    own = whole.grad[share.first : share.first + share.count].clone()
    if parameter.grad is None:
        parameter.grad = DTensor.from_local(own, share.mesh, parameter.placements, run_check=False)
    else:
        parameter.grad.to_local().add_(own)


@torch.no_grad()
def sum_over_replicas(causal: nn.Module) -> None:
    """Add up the gradients of ranks with equal experts; every rank must call it once after the passes of a step."""
    for experts, share in _shared(causal):
        if share.mesh.ndim == 1:
            continue
        for parameter in _shared_parameters(experts).values():
            if parameter.grad is not None:
                distributed.all_reduce(parameter.grad.to_local(), group=share.mesh.get_group(0))  # type: ignore[attr-defined]
