"""Slow, obvious twins that need torch: rows from prefixes, and the loss of every trajectory run alone.

Sample       token ids and this trajectory's own loss weight at each of them
make_row     the columns of one packed row, from the set of all prefixes and nothing else
alone        loss and gradients of samples run one by one through transformers' own attention
tiny_model   small random models whose norms stay in float64
sample_sets  hypothesis: sets of samples that branch, repeat, and end inside one another
packed_directory, write_rows, tiny_config  what the trainer reads, on disk
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from treepack.files.directory import finished_directory
from treepack.files.manifest import Provenance
from treepack.files.manifest_entries import TokenizerEntry
from treepack.pack.files import write_packed
from treepack.pack.plan.plan import Plan
from treepack.pack.plan.planning import plan_rows
from treepack.pack.plan.problem import RowLimits
from treepack.pack.row import Row
from treepack.pack.rows import pack_rows
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie

VOCABULARY = 50

_COMMON = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_ROTARY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {**_ROTARY, "num_key_value_heads": 2, "head_dim": 4},
    "llama": {**_ROTARY, "num_key_value_heads": 1},
    "gpt_neox": {**_ROTARY},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 256},
}
_DROPOUT = ("attn_pdrop", "embd_pdrop", "resid_pdrop")


@dataclass(frozen=True)
class Sample:
    """A trajectory: token ids, and its own loss weight at each (0 at the first, which nothing predicts)."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]


def make_row(samples: Sequence[Sample], *, row_id: int = 0) -> Row:
    """The packed row of `samples`; sorted prefixes are in depth-first order."""
    prefixes = sorted({s.tokens[:n] for s in samples for n in range(1, len(s.tokens) + 1)})
    at = {prefix: i for i, prefix in enumerate(prefixes)}
    below = [[i for i, p in enumerate(prefixes) if p[: len(prefix)] == prefix] for prefix in prefixes]
    weight = np.zeros(len(prefixes))
    for sample in samples:
        for n, own in enumerate(sample.weights, start=1):
            weight[at[sample.tokens[:n]]] += own
    passing = [sum(s.tokens[: len(prefix)] == prefix for s in samples) for prefix in prefixes]
    return Row(
        row_id=row_id,
        step=None,
        input_ids=np.array([prefix[-1] for prefix in prefixes], np.int32),
        position_ids=np.array([len(prefix) - 1 for prefix in prefixes], np.int32),
        parent=np.array([at.get(prefix[:-1], -1) for prefix in prefixes], np.int32),
        subtree_end=np.array([max(indices) + 1 for indices in below], np.int32),
        scale=np.array(passing, np.int32),
        loss_weight=weight,
        trajectory_ids=[str(i) for i in range(len(samples))],
        trajectory_groups=["g"] * len(samples),
        trajectory_ends=np.array([at[sample.tokens] for sample in samples], np.int32),
        terms=None,
    )


def once(samples: Sequence[Sample]) -> list[Sample]:
    """`samples` with every weight divided by the number of samples that train the same prefix."""
    trained = Counter(s.tokens[: n + 1] for s in samples for n, weight in enumerate(s.weights) if weight)
    return [
        Sample(s.tokens, tuple(weight / max(trained[s.tokens[: n + 1]], 1) for n, weight in enumerate(s.weights)))
        for s in samples
    ]


def tiny_model(kind: str, *, attention: str = "sdpa", dtype: torch.dtype = torch.float64, **fields: Any) -> Any:
    """A random two-layer model, or one with other `fields`; equal arguments give equal weights."""
    config = AutoConfig.for_model(kind, **{**CONFIGS[kind], **_COMMON, **fields})
    for name in _DROPOUT:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
        for parameter in model.parameters():
            # Weights of order one, so that attention is far from uniform and a wrong mask shows.
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    keep_norms(model)
    return model


def keep_norms(model: nn.Module) -> None:
    """Swap transformers' RMS norms, which round to float32 inside, for torch's, which keep the dtype."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm") and not isinstance(child, nn.RMSNorm):
                weight: Any = child.weight
                epsilon: Any = child.variance_epsilon
                norm = nn.RMSNorm(weight.shape, eps=epsilon)
                norm.weight = weight
                setattr(parent, name, norm)


def alone(model: Any, samples: Sequence[Sample]) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum over samples and tokens of weight * nll, and its gradient by parameter; one forward per sample."""
    total = torch.zeros((), dtype=torch.float64)
    model.zero_grad()
    for sample in samples:
        tokens = torch.tensor(sample.tokens)
        logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        nll = cross_entropy(logits[:-1], tokens[1:], reduction="none")
        loss = (nll.double() * torch.tensor(sample.weights[1:], dtype=torch.float64)).sum()
        torch.autograd.backward(loss)
        total = total + loss.detach()
    return total, gradients(model)


def gradients(model: Any) -> dict[str, Tensor]:
    """Gradient of every parameter, zero for a parameter without one."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()
    }


def worst_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest |actual - expected| / |expected| over parameters, in Euclidean norms.

    Some gradients are zero in exact arithmetic (a lone token's attention), so a parameter's norm counts as at
    least a millionth of the whole gradient's.
    """
    assert actual.keys() == expected.keys()
    whole = float(torch.stack([g.norm() for g in expected.values()]).norm())
    return max(
        float((actual[name] - g).norm()) / max(float(g.norm()), 1e-6 * whole, 1e-300) for name, g in expected.items()
    )


@st.composite
def sample_sets(draw: st.DrawFn, *, max_samples: int = 7, max_suffix: int = 6) -> list[Sample]:
    """Samples that each continue a prefix of an earlier one, or of none, by up to `max_suffix` tokens.

    A suffix of none makes a prefix or a duplicate; of one, a single-token branch; chains go three levels and deeper.
    """
    sequences: list[tuple[int, ...]] = [tuple(draw(st.lists(_TOKENS, min_size=1, max_size=2 * max_suffix)))]
    for _ in range(draw(st.integers(1, max_samples - 1))):
        base = draw(st.sampled_from([(), *sequences, *sequences]))
        cut = draw(st.integers(0, len(base)))
        suffix = tuple(draw(st.lists(_TOKENS, min_size=0 if cut else 1, max_size=max_suffix)))
        sequences.append(base[:cut] + suffix)
    return [Sample(s, (0.0, *draw(_weights(len(s) - 1)))) for s in sequences]


_TOKENS = st.integers(0, VOCABULARY - 1)


def _weights(size: int) -> st.SearchStrategy[list[float]]:
    return st.lists(st.sampled_from([0.0, 1.0, 1.0, 0.25, 3.0]), min_size=size, max_size=size)


def packed_directory(
    path: Path, trajectories: Sequence[Trajectory], *, capacity: int, tokenizer: TokenizerEntry | None = None
) -> Path:
    """`trajectories` as a packed directory at `path`, whose manifest names `tokenizer`."""
    trie = build_trie(trajectories)
    with finished_directory(path, overwrite=True) as temporary:
        rows = pack_rows(trie, plan_rows(trie, capacity=capacity))
        write_packed(rows, temporary, capacity=capacity, provenance=Provenance(tokenizer=tokenizer))
    return path


def write_rows(
    path: Path, trajectories: Sequence[Trajectory], rows: Sequence[int], *, normalize: str = "token"
) -> Path:
    """`trajectories` as a packed directory at `path`, each in the row that `rows` gives it, without gaps."""
    trie = build_trie(trajectories)
    wanted = {t.trajectory_id: row for t, row in zip(trajectories, rows, strict=True)}
    chosen = [wanted[name] for name in trie.trajectories["trajectory_id"].to_pylist()]
    plan = Plan("given", RowLimits(4096), np.unique(chosen, return_inverse=True)[1])
    with finished_directory(path, overwrite=True) as temporary:
        written = pack_rows(trie, plan, normalize=normalize)
        write_packed(written, temporary, capacity=4096, provenance=Provenance(options={"normalize": normalize}))
    return path


def tiny_config(path: Path, kind: str = "qwen3", **fields: Any) -> Path:
    """A config file at `path` of a model that trains in no time."""
    path.write_text(json.dumps({"model_type": kind, **CONFIGS[kind], **_COMMON, **fields}))
    return path
