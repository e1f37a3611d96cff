"""The share of a rank in the tokens of a row, if several ranks compute the row together.

    share_rows(causal, group)          from now on the ranks of the process group share every row of the model
    group.share(num_tokens)            --> TokenShare: which tokens this rank computes
    share.cut(column)                  the own tokens of a column: the input of the model
    share.heads_of, tokens_of          around attention: all tokens of a part of the heads, and back
    share.recurrent(functions)         the same around the functions of recurrent layers
    share.own_targets, whole, total    around the output layer: values about targets belong to the rank of their parent

Norms, projections, experts and the output layer compute the own tokens only. Attention, recurrences and convolutions
compute whole rows, of fewer heads or channels, and so need no change. All ranks have the columns of
the whole row, and compute the same loss. Their gradients are parts, whose sum over the ranks is the gradient.

A rank of a row with fewer tokens than ranks may have no token. The model then computes one token for it, whose results
are dropped, because many models cannot run a row of length 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from treepack.data.transfers import sent
from treepack.errors import TreepackError
from treepack.sequence.exchange import exchange, gather_values, split_evenly, sum_values

_GROUP = "_treepack_sequence"  # attribute of a model: its `SequenceGroup`


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks of a process group that compute every row together; `rank` is this one of `size`."""

    group: Any
    rank: int
    size: int

    def share(self, num_tokens: int, num_rows: int = 1) -> TokenShare:
        """Return the share of this rank in `num_rows` rows of `num_tokens` tokens each, padding included."""
        return TokenShare(self, split_evenly(num_tokens, self.size), num_rows)

    def includes(self, group: Any) -> bool:
        """Return True if all ranks of a process group compute the rows of this one."""
        return set(distributed.get_process_group_ranks(group)) <= set(distributed.get_process_group_ranks(self.group))

    def add_up(self, gradient: Tensor) -> None:
        """Replace the part of a gradient that this rank has by the sum over the ranks."""
        distributed.all_reduce(gradient, group=self.group)


def share_rows(causal: Any, group: Any) -> None:
    """Let the ranks of a process group compute the rows of a model together; None ends it.

    Every rank of the group must compute the same rows in the same order. Gradients of parameters are parts, which the
    caller adds up over the ranks.

    Args:
        causal: the causal language model of transformers.
        group: the process group.

    Raises:
        TreepackError: the model's heads cannot be divided by the number of ranks, or its layers cannot share rows.
    """
    if group is None or distributed.get_world_size(group) == 1:
        setattr(causal, _GROUP, None)
        return
    check_heads(causal.config.get_text_config(), distributed.get_world_size(group), type(causal).__name__)
    setattr(causal, _GROUP, SequenceGroup(group, distributed.get_rank(group), distributed.get_world_size(group)))


def sequence_of(causal: Any) -> SequenceGroup | None:
    """Return the ranks that compute the rows of a model together; None if each rank computes whole rows."""
    group: SequenceGroup | None = getattr(causal, _GROUP, None)
    return group


def check_heads(config: Any, size: int, source: str, *, option: str = "--sequence-ranks") -> None:
    """Refuse a model whose heads `size` ranks cannot share, by its configuration; `option` sets their number.

    Raises:
        TreepackError: naming the layers.
    """
    fields = ("num_attention_heads", "linear_num_value_heads", "mamba_num_heads", "mamba_n_heads", "num_mamba_heads")
    for name in fields:
        values = getattr(config, name, None)
        for heads in values if isinstance(values, (list, tuple)) else [values]:
            if isinstance(heads, int) and heads % size:
                raise _indivisible(source, heads, size, option)


def _indivisible(source: str, heads: int, size: int, option: str = "--sequence-ranks") -> TreepackError:
    return TreepackError(
        f"{source}: {size} ranks cannot share the {heads} heads of a layer; give {option} a divisor of {heads}"
    )


@dataclass(frozen=True)
class TokenShare:
    """The tokens of a pass that a rank computes: in each of `num_rows` rows the tokens begin .. end - 1.

    Attributes:
        sequence: the ranks.
        edges: of the tokens of each rank.
        num_rows: rows of equal length, side by side.
    """

    sequence: SequenceGroup
    edges: list[int]
    num_rows: int = 1

    @property
    def begin(self) -> int:
        """The first own token of a row."""
        return self.edges[self.sequence.rank]

    @property
    def end(self) -> int:
        """One past the last own token of a row."""
        return self.edges[self.sequence.rank + 1]

    def cut(self, column: Tensor, dim: int = 0) -> Tensor:
        """Return the own tokens of a column of T tokens along `dim`; its first token if this rank has none."""
        begin = 0 if self.begin == self.end else self.begin
        # A copy, because torch.compile makes another version of layers for a view that starts inside its memory.
        return column.narrow(dim, begin, max(self.end - self.begin, 1)).clone()

    def weights(self, column: Tensor) -> Tensor:
        """Return `cut` of a column of weights [T] of one row; 0 for the token of a rank that has none."""
        own = self.cut(column)
        return torch.zeros_like(own) if self.begin == self.end else own

    def cut_flat(self, column: Tensor) -> Tensor:
        """Return the own tokens [B t, ...] of a column [B T, ...] of B rows."""
        return self.cut(column.view(self.num_rows, -1, *column.shape[1:]), 1).flatten(0, 1)

    def heads_of(self, x: Tensor) -> Tensor:
        """Return all tokens of this rank's heads, of own tokens with all heads: [B, H, t, D] -> [B, h, T, D].

        Heads that are fewer than the ranks, or not divisible by their number, are repeated first.
        """
        size, heads = self.sequence.size, x.shape[1]
        copies = size // gcd(size, heads)
        # 2 heads a b on 4 ranks -> a a b b, one for each rank
        x = x.repeat_interleave(copies, 1) if copies > 1 else x
        return self._to_heads(x.permute(2, 1, 0, 3)).permute(2, 1, 0, 3)

    def tokens_of(self, x: Tensor) -> Tensor:
        """Return own tokens with all heads, of all tokens with this rank's heads: [B, T, h, D] -> [B, t, H, D]."""
        return self._to_tokens(x.permute(1, 2, 0, 3), x.shape[2] * self.sequence.size).permute(2, 0, 1, 3)

    def query_heads_of(self, x: Tensor) -> Tensor:
        """Return `heads_of` for heads that must not be repeated.

        Raises:
            TreepackError: the ranks cannot share them.
        """
        if x.shape[1] % self.sequence.size:
            raise _indivisible("a layer", x.shape[1], self.sequence.size)
        return self.heads_of(x)

    def part_of_heads(self, x: Tensor | None) -> Tensor | None:
        """Return the entries of this rank's heads, of a parameter with one entry per head, such as sinks [H]."""
        if x is None:
            return None
        edges = split_evenly(len(x), self.sequence.size)
        return x[edges[self.sequence.rank] : edges[self.sequence.rank + 1]]

    def recurrent(self, functions: Any) -> _SharedRecurrence:
        """Return the functions of recurrent layers on own tokens, by `functions` on whole rows."""
        return _SharedRecurrence(self, functions)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the arguments of attention for whole rows and this rank's heads.

        Raises:
            TreepackError: the ranks cannot share the heads.
        """
        return self.query_heads_of(query), self.heads_of(key), self.heads_of(value)

    def _to_heads(self, x: Tensor) -> Tensor:
        """Exchange [t, H, ...] for [T, h, ...]."""
        own, heads = x[: self.end - self.begin], split_evenly(x.shape[1], self.sequence.size)
        return exchange(own, self.edges, heads, self.sequence.group, gathers_tokens=True)

    def _to_tokens(self, x: Tensor, heads: int) -> Tensor:
        """Exchange [T, h, ...] for [t, H, ...], with H = `heads`."""
        edges = split_evenly(heads, self.sequence.size)
        own = exchange(x, self.edges, edges, self.sequence.group, gathers_tokens=False)
        return own if len(own) else own.new_zeros(1, *own.shape[1:]) + own.sum()

    def own_targets(self, targets: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return the targets whose parents this rank has: their numbers among all, and themselves.

        Args:
            targets: int64 tokens [n], input_ids [B T] and parent [B T]; see `token_loss.tree_logprobs`.

        Returns:
            int64 [m], on the device of the tokens; and the tokens [m], input_ids, and for each entry of parent its
            index among the own tokens, which has no meaning for a token of a different rank.
        """
        tokens, input_ids, parent = targets
        length, own = self.edges[-1], max(self.end - self.begin, 1)
        above = parent.index_select(0, tokens)
        offset = above % length
        places = ((above >= 0) & (offset >= self.begin) & (offset < self.end)).nonzero().squeeze(-1)
        # Row 1 of rows of 8 tokens, own tokens 4 .. 7: parent 13 -> 1 * 4 + 5 - 4 = 5
        local = parent // length * own + parent % length - self.begin
        return places, (tokens.index_select(0, places), input_ids, local)

    def whole(self, values: Tensor, places: Tensor, count: int) -> Tensor:
        """Return [count, ...] values of all ranks, of which this one has `values` [m, ...] at `places`."""
        return gather_values(values, sent(places, values.device), count, self.sequence.group)

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks of `values`; its gradient is that of the own part."""
        return sum_values(values, self.sequence.group)


class _SharedRecurrence(NamedTuple):
    """`convolve` and `scan` of recurrent layers, see `recurrent.dispatch`, with own tokens in and out."""

    share: TokenShare
    functions: Any

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        """Compute the convolution [N, C] of N own tokens: whole rows of a part of the channels."""
        share, channels = self.share, x.shape[1]
        part: Any = share.part_of_heads
        # [B t, C] -> [B, t, C] -> [t, C, B]: channels take the place of heads
        rows = share._to_heads(x.view(share.num_rows, -1, channels).permute(1, 2, 0))
        tokens = rows.permute(2, 0, 1).reshape(-1, rows.shape[1])
        out = self.functions.convolve(tokens, part(weight), part(bias), activation)
        out = out.view(share.num_rows, -1, out.shape[1]).permute(1, 2, 0)
        return share._to_tokens(out, channels).permute(2, 0, 1).reshape(-1, channels)

    def scan(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> Tensor:
        """Compute the scan [N, H, V] of N own tokens: whole rows of a part of the heads.

        Raises:
            TreepackError: the ranks cannot share the heads.
        """
        share, shape = self.share, v.shape

        def rows_of(x: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
            # [B t, H, K] -> [B, H, t, K] -> [B, h, T, K] -> [B T, h, K]; [N, H] has K = 1
            rows = x.reshape(share.num_rows, -1, x.shape[1], x[0, 0].numel()).transpose(1, 2)
            whole = of(rows).transpose(1, 2)
            return whole.reshape(-1, whole.shape[2], *x.shape[2:])

        values = rows_of(v, share.query_heads_of)
        keys = (rows_of(q, share.heads_of), rows_of(k, share.heads_of))
        rate = None if beta is None else rows_of(beta, share.query_heads_of)
        out = self.functions.scan(*keys, values, rows_of(g, share.query_heads_of), rate)
        return share.tokens_of(out.view(share.num_rows, -1, *out.shape[1:])).reshape(shape)
