"""Calls that all integrations make, on models whose layers differ: windows, sinks, an indexer, head dimensions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.refusal import refusal
from support.tiny_families import NOT_COMPARED, KeepFloat64, tiny_family, transformers_types
from treepack.integrations.tree_model import check_model, use_tree_attention
from treepack.integrations.trl_pairs import share_prefixes

MIXED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
CHUNKS = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 3}
# Four sequences of 12 tokens; the second has 9 tokens of the first, and the fourth 7 of the third.
IDS = torch.randint(1, 50, (4, 12), generator=torch.Generator().manual_seed(0))
IDS[1, :9], IDS[3, :7] = IDS[0, :9], IDS[2, :7]


def sharing(kind: str, **fields: Any) -> Any:
    """Return a tiny model that computes padded batches on rows."""
    if kind not in transformers_types() or kind in NOT_COMPARED:
        pytest.skip(f"this version of transformers has no {kind}")
    model = tiny_family(kind, **fields)
    use_tree_attention(model, torch.device("cpu"), None)
    check_model(model)
    share_prefixes(model)
    return model


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "fields"),
    [("qwen3", {}), ("gpt_oss", MIXED), ("llama4_text", CHUNKS), ("gemma4_text", MIXED), ("deepseek_v32", {})],
)
def test_a_batch_that_shares_prefixes_has_the_logits_of_its_sequences(kind: str, fields: dict[str, Any]) -> None:
    with KeepFloat64():
        model = sharing(kind, **fields)
        logits = model(input_ids=IDS, attention_mask=torch.ones_like(IDS), use_cache=False).logits[:, :-1]
        expected = tiny_family(kind, **fields)(input_ids=IDS, use_cache=False).logits[:, :-1]
    assert float((logits - expected).abs().max()) < 1e-11


@torch.no_grad()
def test_paths_beyond_the_keys_that_an_indexer_selects_are_refused() -> None:
    with KeepFloat64():
        model = sharing("deepseek_v32", index_topk=11)
        assert "path of 12 tokens, and the model is exact on paths of up to 11" in refusal(
            model, input_ids=IDS, use_cache=False
        )
        assert model(input_ids=IDS[:, :11], use_cache=False).logits.shape[1] == 11


def test_positions_of_the_caller_are_refused() -> None:
    model = sharing("qwen3")
    assert "call it without position_ids" in refusal(
        model, input_ids=IDS, position_ids=torch.arange(12)[None], use_cache=False
    )
