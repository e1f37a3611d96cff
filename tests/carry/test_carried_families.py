"""Every family of docs/models.md has the same gradients from a row in pieces as from the whole row, in float64.

`tests/model/test_families.py` compares the gradients of the whole row with gradients of the trajectories alone.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.model_table import ACCEPTED, SIZE, Family
from support.oracle_model import Sample, gradients, make_row, worst_error
from support.tiny_families import (
    HAS_RECURRENT,
    NOT_COMPARED,
    KeepFloat64,
    family_config,
    spread_weights,
    transformers_types,
)
from treepack.carry.backward import CarryOptions, backward_row
from treepack.carry.row import open_row
from treepack.carry.states import follow_layers
from treepack.data.batch import make_batch
from treepack.errors import TreepackError
from treepack.model.forward import row_loss
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel

TRUNK = tuple(range(1, 7))
PATHS = (
    (*TRUNK, 7, 8, 9, 10, 11, 12),
    (*TRUNK, 40, 41, 42, 43, 44),
    (*TRUNK, 40, 41, 7, 8),
    (*TRUNK, 40, 41, 7, 8),  # a duplicate
    (*TRUNK, 7, 8, 9),  # ends inside another trajectory
    (20, 21, 22, 23, 24, 25, 26),  # a tree of its own
)
ROW = make_batch(make_row([Sample(path, (0.0, *[1.0] * (len(path) - 1))) for path in PATHS]), multiple=8)

# Windows with caps, sinks with experts, chunks, an indexer, values of a different width than keys, and convolutions.
# `test_carried_states` has the other recurrent layers.
QUICK = "gemma2 gpt_oss llama4_text deepseek_v32 mimo_v2_flash lfm3".split()


def tiny(folder: Path, family: Family, **fields: Any) -> LoadedModel:
    """A tiny model of the family in float64, with weights of order one."""
    is_compared = family.kind in transformers_types() and family.kind not in NOT_COMPARED
    if not is_compared or (family.recurrent and not HAS_RECURRENT):
        pytest.skip(f"{family.kind} of transformers {transformers.__version__} cannot be compared")
    path = folder / "config.json"
    path.write_text(json.dumps(family_config(family.kind, **{**family.options, **fields}).to_dict(), default=str))
    loaded = load_model(path, dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        spread_weights(loaded.model)
    return loaded


def assert_exact_in_pieces(loaded: LoadedModel, limits: list[int]) -> None:
    with KeepFloat64():
        loaded.model.zero_grad()
        loss = row_loss(loaded, ROW)
        torch.autograd.backward(loss)
        expected = gradients(loaded.model)
        assert any(bool(gradient.any()) for gradient in expected.values())
        for limit in limits:
            loaded.model.zero_grad()
            result = backward_row(loaded, ROW, CarryOptions(limit))
            assert result.tokens_forward > result.tokens_backward == ROW.num_tokens
            torch.testing.assert_close(result.loss, loss.detach(), rtol=1e-9, atol=0)
            assert worst_error(gradients(loaded.model), expected) <= 1e-9


def by_name(family: Family) -> Any:
    marks = [] if family.kind in QUICK else [pytest.mark.slow]
    return pytest.param(family, id=family.name, marks=marks)


def family_named(kind: str) -> Family:
    return next(family for family in ACCEPTED if family.kind == kind)


@pytest.mark.parametrize("family", [by_name(family) for family in ACCEPTED])
def test_a_row_in_pieces_has_the_gradients_of_the_whole_row(tmp_path: Path, family: Family) -> None:
    loaded = tiny(tmp_path, family)
    assert int(ROW.position_ids.max()) > 2 * SIZE  # windows are shorter than paths
    assert_exact_in_pieces(loaded, [3] if family.kind in QUICK else [3, 7])


# Layers that read the keys of an earlier layer, experts beside a dense layer, and an indexer that passes its keys on.
SHARED: list[tuple[str, dict[str, Any]]] = [
    (
        "gemma3n_text",
        {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
    ),
    ("deepseek_v3", {"first_k_dense_replace": 0, "n_group": 2, "topk_group": 1, "num_local_experts": 8}),
    ("glm_moe_dsa", {"index_topk": 12, "indexer_types": ["full", "shared"]}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "fields"), SHARED, ids=[f"{kind}-{next(iter(fields))}" for kind, fields in SHARED])
def test_shared_keys_and_groups_of_experts_are_exact_in_pieces(
    tmp_path: Path, kind: str, fields: dict[str, Any]
) -> None:
    assert_exact_in_pieces(tiny(tmp_path, family_named(kind), **fields), [3, 7])


def test_layers_that_share_attention_modules_are_refused_by_name(tmp_path: Path) -> None:
    loaded = tiny(tmp_path, family_named("zamba2"), num_mem_blocks=1)
    with pytest.raises(TreepackError, match="2 of its layers share 1 attention modules; run this model"):
        backward_row(loaded, ROW, CarryOptions(3))


def test_an_error_in_a_pass_leaves_no_states_in_the_model(tmp_path: Path) -> None:
    loaded = tiny(tmp_path, family_named("lfm3"))
    row = open_row(loaded, ROW, 3, with_gradients=True)
    switches = follow_layers(loaded.causal)
    assert switches
    with suppress(KeyboardInterrupt), row.running(row.plan.passes[0]):
        assert all(switch.states is not None for switch in switches)
        raise KeyboardInterrupt
    assert all(switch.states is None for switch in switches)
