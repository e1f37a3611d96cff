"""Every type of causal language model is exact on trees, or refused in one sentence as docs/models.md describes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.model_table import ACCEPTED, REFUSED, SIZE, Family
from support.oracle_model import VOCABULARY, Sample, alone, gradients, make_row, worst_error
from support.tiny_families import (
    HAS_RECURRENT,
    IS_OLD,
    NOT_COMPARED,
    KeepFloat64,
    family_config,
    spread_weights,
    tiny_family,
    transformers_types,
)
from treepack.attention import register
from treepack.attention.indexed import AllAncestors
from treepack.attention.interface import AttentionKind
from treepack.data.batch import make_batch
from treepack.errors import TreepackError
from treepack.ingest.array_rollouts import trajectories_from_arrays
from treepack.model.accept.compatibility import check_fits
from treepack.model.accept.observation import observe
from treepack.model.collation import batch_logprobs, batch_loss, collate
from treepack.model.forward import row_loss
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel
from treepack.model.verify.gradients import verify_gradients
from treepack.pack.options import PackOptions
from treepack.pack.packing import plan_packing
from treepack.recurrent.interface import CONVOLUTION
from treepack.trie.builders.in_memory import build_trie

# 1 - 2 - 3 - 4 - 5, 1 - 2 - 6 and 1 - 2 - 6 - 9 - 3 in one tree, and 7 - 8 beside it
SAMPLES = [
    Sample((1, 2, 3, 4, 5), (0.0, 1.0, 0.0, 2.0, 1.0)),
    Sample((1, 2, 6), (0.0, 1.0, 1.0)),
    Sample((1, 2, 6, 9, 3), (0.0, 1.0, 1.0, 0.5, 1.0)),
    Sample((7, 8), (0.0, 0.5)),
]


NO_INTERFACE = "does not use transformers' attention interface"


# Model type, options on top of its defaults, and the reason.
REFUSED_TYPES: list[tuple[str, dict[str, Any], str]] = [
    ("bloom", {}, f"{NO_INTERFACE}|makes an attention mask of its own"),
    ("openai-gpt", {}, NO_INTERFACE),
    ("gpt_neox_japanese", {}, NO_INTERFACE),
    ("stablelm", {}, "does not pass subtree_end on to its attention"),
    ("nemotron", {}, "does not pass subtree_end on to its attention"),
    ("biogpt", {}, "makes an attention mask of its own"),
    ("mpt", {}, "fails on a packed row, which has .* no attention mask"),
    ("bert", {}, "the attention is not causal"),
    ("mamba2", {}, "layer 0 is 'mamba'|does not pass subtree_end on to its recurrent layers|offers no function for"),
]


EXACT = "opt phimoe ernie4_5_moe hunyuan_v1_moe granite mixtral gemma deepseek_v3 starcoder2 olmo2 gpt_oss".split()


# Types that change their logits, or the hidden states before the output layer.
MAPPED: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.06},
    "cohere2": {},
    "granite": {"logits_scaling": 8.0},
    "granitemoe": {"logits_scaling": 8.0},
    "minicpm3": {},
    "modernbert-decoder": {},
    "nanochat": {},
    "gemma3_text": {"final_logit_softcapping": 3.0},
    "gemma2": {"final_logit_softcapping": 3.0},
}


# Types that transformers 5.24 cannot make, of which 4 because their code looks up our attention in a table of its own.
MAX_UNMADE = 15


def skip_old(kind: str) -> None:
    if kind in NOT_COMPARED:
        pytest.skip(f"{kind} of transformers {transformers.__version__}: see NOT_COMPARED")


def loss_or_refusal(kind: str, **fields: Any) -> str | None:
    """Compare batch_loss and its gradient with the trajectories alone; return the refusal instead if there is one."""
    skip_old(kind)
    register()
    model = tiny_family(kind, attention="treepack_auto", **fields)
    with KeepFloat64():
        try:
            loss = batch_loss(model, collate([make_batch(make_row(SAMPLES))]))
        except TreepackError as error:
            return str(error)
        torch.autograd.backward(loss)
        expected, of_each = alone(tiny_family(kind, **fields), SAMPLES)
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-9), kind
    assert worst_error(gradients(model), of_each) < 1e-9, kind
    return None


@pytest.mark.parametrize(("kind", "fields", "reason"), REFUSED_TYPES, ids=[kind for kind, *_ in REFUSED_TYPES])
def test_a_model_whose_loss_would_be_wrong_is_refused_with_its_type_and_the_reason(
    kind: str, fields: dict[str, Any], reason: str
) -> None:
    refusal = loss_or_refusal(kind, **fields)
    assert refusal is not None
    assert re.search(reason, refusal)
    assert f"model type {kind}" in refusal
    assert "\n" not in refusal


@pytest.mark.parametrize("kind", EXACT)
def test_the_loss_of_a_batch_is_that_of_every_trajectory_alone(kind: str) -> None:
    assert loss_or_refusal(kind) is None


@pytest.mark.parametrize("kind", MAPPED)
def test_the_loss_is_that_of_the_logits_of_the_model(tmp_path: Path, kind: str) -> None:
    assert loss_or_refusal(kind, **MAPPED[kind]) is None
    loaded = load_model(saved_config(tmp_path, kind, **MAPPED[kind]), dtype=torch.float64)
    assert verify_gradients(loaded, [make_batch(make_row(SAMPLES))]).passed


@pytest.mark.parametrize("kind", ["cohere", "granite", "nanochat"])
def test_tempered_logprobs_and_entropies_are_those_of_the_logits_of_the_model(kind: str) -> None:
    register()
    model, plain = (tiny_family(kind, attention=name, **MAPPED[kind]) for name in ("treepack_auto", "eager"))
    tokens, temperature = torch.tensor([1, 2, 6, 9, 3]), 0.7
    arrays = trajectories_from_arrays([tokens.numpy()], [[0, 1, 1, 1, 1]], rewards=[1.0])
    inputs = collate([make_batch(row) for row in plan_packing(build_trie(arrays), PackOptions(capacity=8))])
    with KeepFloat64():
        logprobs, entropies = batch_logprobs(model, inputs, temperature=temperature)
        logs = (plain(input_ids=tokens[None], use_cache=False).logits[0, :-1] / temperature).log_softmax(-1)
        expected = logs.gather(-1, tokens[1:, None])[:, 0]
        torch.testing.assert_close(logprobs, expected, rtol=1e-9, atol=0)
        torch.testing.assert_close(entropies, -(logs.exp() * logs).sum(-1), rtol=1e-9, atol=0)
        factors = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
        torch.autograd.backward((logprobs * factors + entropies * factors.flip(0)).sum())
        torch.autograd.backward((expected * factors - (logs.exp() * logs).sum(-1) * factors.flip(0)).sum())
    assert worst_error(gradients(model), gradients(plain)) < 1e-9


def saved_config(folder: Path, kind: str, **fields: Any) -> Path:
    path = folder / f"{kind}.json"
    path.write_text(json.dumps(family_config(kind, **fields).to_dict(), default=str))
    return path


def test_the_threshold_of_phimoes_router_is_no_dropout_and_is_saved_as_it_was(tmp_path: Path) -> None:
    loaded = load_model(saved_config(tmp_path, "phimoe", router_jitter_noise=0.01, attention_dropout=0.1))
    assert [note.split()[0] for note in loaded.notes if "first" not in note] == ["attention_dropout"]
    loaded.model.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["router_jitter_noise"] == 0.01


def test_noise_on_the_input_of_routers_is_set_to_zero(tmp_path: Path) -> None:
    loaded = load_model(saved_config(tmp_path, "mixtral", router_jitter_noise=0.1))
    assert loaded.model.config.router_jitter_noise == 0
    assert any(note.startswith("router_jitter_noise set to 0") for note in loaded.notes)


@pytest.mark.slow
def test_every_type_of_transformers_is_exact_or_refused() -> None:
    register()
    outcomes: dict[str, str | None] = {}
    unmade = []
    for kind in transformers_types():
        try:
            tiny_family(kind, attention="treepack_auto")
        except Exception:  # code of transformers
            unmade.append(kind)
        else:
            outcomes[kind] = loss_or_refusal(kind)
    print(f"{len(outcomes)} types, {sum(text is None for text in outcomes.values())} exact; not made: {unmade}")
    assert len(unmade) <= MAX_UNMADE
    assert all(text is None or ("\n" not in text and "model type" in text) for text in outcomes.values())
    assert sum(text is None for text in outcomes.values()) >= 70


# Families whose models are made in no time and that differ most: windows, chunks, sinks, caps, an indexer, experts, and
# convolutions with windows. `test_hybrid_models` has the other recurrent layers.
QUICK = "gemma2 gpt_oss llama4_text deepseek_v32 olmo3 lfm3".split()


def sample(*tokens: int) -> Sample:
    return Sample(tokens, (0.0,) + (1.0,) * (len(tokens) - 1))


# Four trajectories: two branches after 6 tokens, one of them again after 2 more, and a tree of its own.
TRUNK = tuple(range(1, 7))


TRAJECTORIES = [
    sample(*TRUNK, 7, 8, 9, 10, 11, 12),
    sample(*TRUNK, 40, 41, 42, 43, 44),
    sample(*TRUNK, 40, 41, 7, 8),
    sample(20, 21, 22, 23, 24, 25, 26),
]


ROW = make_batch(make_row(TRAJECTORIES))


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
