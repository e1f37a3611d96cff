r"""The idea of treepack in one file: train on a tree of rollouts, with the gradients of each rollout alone.

    rollouts            trie               one row      7  8  1  2  3  4
    a  7 8 1 2                +- 1 2       subtree_end  6  6  4  4  6  6      token q sees token k
    b  7 8 3 4          7 8 --+            parent      -1  0  1  2  1  4      if k <= q < subtree_end[k]
                              +- 3 4       position     0  1  2  3  2  3

    python examples/nanotree.py            prints the largest difference of a gradient: about 5e-15

1. Sort the rollouts. Neighbours then have the longest common prefixes, so one comparison per rollout finds the trie.
2. Store each shared token once. Written in sorted order, the trie is depth-first: every subtree is a contiguous range.
3. Run a transformer on the row. A token may see exactly its ancestors, so it gets the same state as in its rollout.
4. Predict each token from the state of its PARENT, which is not always the token before it (token 3 from token 8).
   A shared token is trained once, with the sum of the weights of the rollouts that train it.

Nothing else is needed: autograd adds the gradients of all rollouts in the tokens that they share. The library has
these steps in `treepack/trie`, `treepack/pack`, `treepack/attention` and `treepack/model/head/token_loss.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Rollout:
    """One sequence of tokens, and the weight of each in the loss: 0 for a prompt or a tool's answer."""

    tokens: list[int]
    weights: list[float]


@dataclass(frozen=True)
class Row:
    """A forest of rollouts, depth-first; every array has one value per stored token."""

    tokens: np.ndarray
    parent: np.ndarray  # index of the token before it on its path; -1 for the first token of a tree
    subtree_end: np.ndarray  # one past its last descendant
    position: np.ndarray  # number of its ancestors, which is its position in every rollout that contains it
    weight: np.ndarray  # sum over the rollouts that contain it


def shared_prefix(a: list[int], b: list[int]) -> int:
    """Return the number of leading tokens that two sequences share: [7 8 1 2] and [7 8 3 4] -> 2."""
    differs = [x != y for x, y in zip(a, b, strict=False)]
    return differs.index(True) if True in differs else len(differs)


def make_row(rollouts: list[Rollout]) -> Row:
    """Sort rollouts, store each shared prefix once, and describe the trie with a few integers per token.

    `path` contains the indices of the stored tokens of the current rollout. The next rollout keeps the shared prefix
    of this path. Tokens that leave the path have no further descendants, so their subtree ends here.

        a  7 8 1 2    path [0 1 2 3]    stores 7 8 1 2
        b  7 8 3 4    shares 2          tokens 2 and 3 leave: subtree_end[2] = subtree_end[3] = 4
                      path [0 1 4 5]    stores 3 4 with parents 1 and 4
    """
    tokens: list[int] = []
    parent: list[int] = []
    position: list[int] = []
    weight: list[float] = []
    subtree_end: list[int] = []
    path: list[int] = []
    before: list[int] = []
    for rollout in sorted(rollouts, key=lambda each: each.tokens):
        shared = shared_prefix(before, rollout.tokens)
        for index in path[shared:]:
            subtree_end[index] = len(tokens)
        del path[shared:]
        for token in rollout.tokens[shared:]:
            parent.append(path[-1] if path else -1)
            position.append(len(path))
            path.append(len(tokens))
            tokens.append(token)
            weight.append(0.0)
            subtree_end.append(0)
        for index, value in zip(path, rollout.weights, strict=True):
            weight[index] += value  # a token that both rollouts train counts for both
        before = rollout.tokens
    for index in path:
        subtree_end[index] = len(tokens)
    return Row(*(np.array(column) for column in (tokens, parent, subtree_end, position, weight)))


def visible(row: Row) -> Tensor:
    """Return the mask, bool [T (query), T (key)]: a token sees itself and its ancestors.

    subtree_end [6 6 4 4 6 6] ->  1 . . . . .
                                  1 1 . . . .
                                  1 1 1 . . .
                                  1 1 1 1 . .
                                  1 1 . . 1 .      tokens 2 and 3 belong to another branch
                                  1 1 . . 1 1
    """
    query, key = np.arange(len(row.tokens))[:, None], np.arange(len(row.tokens))[None, :]
    return torch.from_numpy((key <= query) & (query < row.subtree_end[None, :]))


class Transformer(torch.nn.Module):
    """A small causal transformer. It gets its positions and its mask as arguments, and a tree needs nothing more."""

    def __init__(self, vocabulary: int, width: int = 32, heads: int = 4, layers: int = 2, length: int = 64) -> None:
        super().__init__()
        self.heads = heads
        self.words = torch.nn.Embedding(vocabulary, width)
        self.positions = torch.nn.Embedding(length, width)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(width, 3 * width) for _ in range(layers))
        self.mix = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))
        self.up = torch.nn.ModuleList(torch.nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = torch.nn.ModuleList(torch.nn.Linear(4 * width, width) for _ in range(layers))
        self.output = torch.nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        """Return logits [T, vocabulary] of tokens [T] at position [T] with mask [T, T]."""
        x = self.words(tokens) + self.positions(position)
        for qkv, mix, up, down in zip(self.qkv, self.mix, self.up, self.down, strict=True):
            # [T, 3 * width] -> three of [heads, T, width / heads]
            q, k, v = qkv(F.layer_norm(x, x.shape[-1:])).view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3)
            seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + mix(seen.transpose(0, 1).reshape(x.shape))
            x = x + down(F.gelu(up(F.layer_norm(x, x.shape[-1:]))))
        logits: Tensor = self.output(F.layer_norm(x, x.shape[-1:]))
        return logits


def row_loss(model: Transformer, row: Row) -> Tensor:
    """Return the sum over the row's tokens of weight * -log p(token | its ancestors)."""
    tokens, parent = torch.from_numpy(row.tokens), torch.from_numpy(row.parent)
    logits = model(tokens, torch.from_numpy(row.position), visible(row))
    targets = np.flatnonzero(row.parent >= 0)  # nothing predicts the first token of a tree
    # parent[targets] of the header's row = [0 1 2 1 4]: state 1 predicts both token 2 and token 4
    losses = F.cross_entropy(logits[parent[targets]], tokens[targets], reduction="none")
    return (losses * torch.from_numpy(row.weight[targets])).sum()


def flat_loss(model: Transformer, rollout: Rollout) -> Tensor:
    """Return the same loss of one rollout as every trainer computes it: causal mask, next token from the one before."""
    tokens, weights = torch.tensor(rollout.tokens), torch.tensor(rollout.weights, dtype=torch.float64)
    length = len(tokens)
    logits = model(tokens, torch.arange(length), torch.ones(length, length, dtype=torch.bool).tril())
    return (F.cross_entropy(logits[:-1], tokens[1:], reduction="none") * weights[1:]).sum()


def gradients(model: Transformer, losses: list[Tensor]) -> list[Tensor]:
    """Return the gradient of the sum of `losses` for each parameter."""
    return list(torch.autograd.grad(torch.stack(losses).sum(), list(model.parameters())))


def sample_rollouts(seed: int, vocabulary: int) -> list[Rollout]:
    """Return rollouts of two prompts that fork at random tokens; one continues a second one, and one is there twice."""
    rng = np.random.default_rng(seed)
    rollouts: list[Rollout] = []
    for prompt in (rng.integers(vocabulary, size=6).tolist(), rng.integers(vocabulary, size=4).tolist()):
        paths = [prompt + rng.integers(vocabulary, size=12).tolist()]
        for _ in range(4):
            parent = paths[rng.integers(len(paths))]
            fork = int(rng.integers(len(prompt), len(parent)))
            paths.append(parent[:fork] + rng.integers(vocabulary, size=8).tolist())
        paths += [paths[0][:-3], paths[1]]
        for path in paths:
            # Each rollout has a weight of its own, as an advantage would be; prompts are not trained.
            advantage = float(rng.normal())
            rollouts.append(Rollout(path, [0.0] * len(prompt) + [advantage] * (len(path) - len(prompt))))
    return rollouts


def main(seed: int = 0, vocabulary: int = 17) -> float:
    """Compare the row with its rollouts one by one, print the figures and return the largest difference."""
    torch.manual_seed(seed)
    model = Transformer(vocabulary).double()
    rollouts = sample_rollouts(seed, vocabulary)
    row = make_row(rollouts)
    tree = gradients(model, [row_loss(model, row)])
    flat = gradients(model, [flat_loss(model, rollout) for rollout in rollouts])
    difference = max((a - b).abs().max().item() for a, b in zip(tree, flat, strict=True))
    largest = max(b.abs().max().item() for b in flat)
    num_flat = sum(len(rollout.tokens) for rollout in rollouts)
    print(f"{len(rollouts)} rollouts, {num_flat} tokens; as a tree {len(row.tokens)} tokens")
    print(f"largest gradient {largest:.3f}, largest difference {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
