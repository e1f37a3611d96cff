"""Every family of docs/models.md is exact on trees, with windows shorter than its paths, or refused as described."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.model_table import ACCEPTED, REFUSED, SIZE, Family
from support.oracle_model import VOCABULARY, Sample, make_row
from support.tiny_families import HAS_RECURRENT, IS_OLD, NOT_COMPARED, family_config, spread_weights, transformers_types
from treepack.attention.indexed import AllAncestors
from treepack.attention.interface import AttentionKind
from treepack.data.batch import make_batch
from treepack.errors import TreepackError
from treepack.model.accept.compatibility import check_fits
from treepack.model.accept.observation import observe
from treepack.model.forward import row_loss
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel
from treepack.model.verify.gradients import verify_gradients
from treepack.recurrent.interface import CONVOLUTION

# Families whose models are made in no time and that differ most: windows, chunks, sinks, caps, an indexer, experts, and
# convolutions with windows. `test_hybrid_models` has the other recurrent layers.
QUICK = "gemma2 gpt_oss llama4_text deepseek_v32 olmo3 lfm3".split()


def sample(*tokens: int) -> Sample:
    return Sample(tokens, (0.0,) + (1.0,) * (len(tokens) - 1))


# Four trajectories: two branches after 6 tokens, one of them again after 2 more, and a tree of its own.
TRUNK = tuple(range(1, 7))
SAMPLES = [
    sample(*TRUNK, 7, 8, 9, 10, 11, 12),
    sample(*TRUNK, 40, 41, 42, 43, 44),
    sample(*TRUNK, 40, 41, 7, 8),
    sample(20, 21, 22, 23, 24, 25, 26),
]
ROW = make_batch(make_row(SAMPLES))


def tiny(folder: Path, family: Family, *, attention: str = "auto", **fields: Any) -> LoadedModel:
    """Return a tiny model of the family in float64, with weights of order one."""
    of_states = family.recurrent or any(word in family.refusal for word in ("state", "scan", "recurrent", "n-grams"))
    is_compared = family.kind in transformers_types() and family.kind not in NOT_COMPARED
    if not is_compared or (of_states and not HAS_RECURRENT):
        pytest.skip(f"{family.kind} of transformers {transformers.__version__} cannot be compared")
    path = folder / "config.json"
    path.write_text(json.dumps(family_config(family.kind, **{**family.options, **fields}).to_dict(), default=str))
    loaded = load_model(path, dtype=torch.float64, attention=attention)
    torch.manual_seed(0)
    spread_weights(loaded.model)
    return loaded


def twists(kinds: frozenset[AttentionKind] | tuple[AttentionKind, ...]) -> set[tuple[str | None, bool, bool]]:
    """Return the window or chunk, the sinks and the cap of every kind of layer, without sizes."""
    return {(kind.reach and kind.reach.kind, kind.has_sinks, kind.softcap is not None) for kind in kinds}


def recurrent_parts(loaded: LoadedModel) -> str:
    """Return the scan that layers of the model call on trees, or "short convolution" if they call only that, or ""."""
    with observe(loaded.causal) as seen:
        options: dict[str, Any] = {"position_ids": ROW.position_ids[None], "subtree_end": ROW.subtree_end[None]}
        loaded.model(input_ids=ROW.input_ids[None], record=seen.attention, use_cache=False, **options)
    names = {call.name for call in seen.attention.recurrent}
    return (names - {CONVOLUTION} or (names and {"short convolution"}) or {""}).pop()


def by_name(family: Family) -> Any:
    marks = [] if family.kind in QUICK else [pytest.mark.slow]
    return pytest.param(family, id=family.name, marks=marks)


@pytest.mark.parametrize("family", [by_name(family) for family in ACCEPTED])
def test_an_accepted_family_has_the_gradients_of_its_trajectories_alone(tmp_path: Path, family: Family) -> None:
    loaded = tiny(tmp_path, family)
    report = verify_gradients(loaded, [ROW])
    assert report.tolerance == 1e-9
    assert report.passed, report.worst
    # The table shows the kinds of layers that were computed, and windows were shorter than paths.
    assert twists(loaded.kinds) == twists(family.attention)
    assert {kind.reach.size for kind in loaded.kinds if kind.reach is not None} <= {SIZE}
    assert int(ROW.position_ids.max()) > 2 * SIZE
    assert recurrent_parts(loaded) == family.recurrent


@pytest.mark.parametrize("family", REFUSED, ids=lambda family: family.name)
def test_a_refused_family_is_refused_for_the_reason_of_the_table(tmp_path: Path, family: Family) -> None:
    if IS_OLD and family.kind == "bloom":
        pytest.skip(f"bloom of transformers {transformers.__version__} makes a mask, and is refused for it")
    with pytest.raises(TreepackError) as caught:
        tiny(tmp_path, family)
    assert family.refusal in str(caught.value)
    assert "\n" not in str(caught.value)


def test_layers_without_attention_are_not_counted_and_a_module_may_attend_twice(tmp_path: Path) -> None:
    layers = ["full_attention", "mlp"]
    feed_forward = Family("Nemotron-H without states", "", "nemotron_h", options={"layers_block_type": layers})
    if IS_OLD or family_config("nemotron_h", layers_block_type=layers).layer_types != layers:
        pytest.skip(f"transformers {transformers.__version__} has other names for the layers of nemotron_h")
    for family in (feed_forward, Family("DiffLlama", "", "diffllama")):
        assert verify_gradients(tiny(tmp_path, family), [ROW]).passed


def family_named(kind: str) -> Family:
    return next(family for family in ACCEPTED if family.kind == kind)


@pytest.mark.parametrize(
    "kind", ["gpt_oss", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gemma2", "llama4_text"))]
)
def test_windows_chunks_sinks_and_caps_are_exact_under_flex(tmp_path: Path, kind: str) -> None:
    loaded = tiny(tmp_path, family_named(kind), attention="flex")
    assert loaded.attention == "flex"
    assert verify_gradients(loaded, [ROW]).passed


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_an_indexer_is_refused_by_name_on_paths_longer_than_its_top_k(tmp_path: Path, kind: str) -> None:
    loaded = tiny(tmp_path, family_named(kind), index_topk=11)  # the longest path has 12 tokens, the row 24
    reason = "path of 12 tokens, .* because its indexer selects 11 keys .* truncate the trajectories to 11 tokens"
    with pytest.raises(TreepackError, match=f"a row has a {reason}"):
        row_loss(loaded, ROW)
    with pytest.raises(TreepackError, match=f"the data has a {reason}"):
        check_fits(loaded, max_token_id=VOCABULARY - 1, tokenizer=None, max_position=11)


def test_a_row_longer_than_the_top_k_of_an_indexer_is_exact_while_its_paths_are_not(tmp_path: Path) -> None:
    # GLM-5 hands the keys of one layer's indexer to the next layer.
    shared: dict[str, Any] = {"index_topk": 12, "indexer_types": ["full", "shared"]}
    loaded = tiny(tmp_path, family_named("glm_moe_dsa"), **shared)
    assert len(ROW.input_ids) > 12
    assert verify_gradients(loaded, [ROW]).passed


def test_an_indexer_runs_unchanged_outside_of_trees(tmp_path: Path) -> None:
    loaded = tiny(tmp_path, family_named("deepseek_v32"), index_topk=5)  # enough for the probe
    indexer = loaded.model.model.layers[0].self_attn.indexer
    states, queries = torch.randn(1, 8, 32, dtype=torch.float64), torch.randn(1, 8, 16, dtype=torch.float64)
    angles = loaded.model.model.rotary_emb(states, torch.arange(8)[None])
    causal = torch.zeros(1, 8, 8, dtype=torch.float64).masked_fill(~torch.ones(8, 8).tril().bool(), float("-inf"))
    skipped = indexer(states, queries, angles, AllAncestors()[:, 0], None)
    selected = indexer(states, queries, angles, causal, None)
    assert skipped.shape == (1, 8, 0)
    assert torch.equal(selected, type(indexer).forward(indexer, states, queries, angles, causal, None))
    assert selected.shape == (1, 8, 5)
