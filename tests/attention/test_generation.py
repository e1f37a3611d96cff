"""A model under tree attention generates and evaluates as it does under sdpa, if `allow_generation` permits it."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor

from support.oracle_model import tiny_model
from support.refusal import refusal
from support.tiny_families import tiny_family, transformers_types
from treepack.attention import allow_generation, register

KINDS = ["qwen3", "gpt2"]

# Three prompts of 5, 2 and 4 tokens, padded on the left; token 0 is the padding.
PROMPTS = torch.tensor([[7, 3, 9, 11, 2], [0, 0, 0, 31, 7], [0, 5, 8, 13, 21]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 1, 1], [0, 1, 1, 1, 1]])
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy without a cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "sampled": {"do_sample": True, "temperature": 0.8},
    "beams": {"num_beams": 3},
    "several sequences": {"do_sample": True, "num_return_sequences": 2},
}
# A row of two branches, 0 - 1 - 2 and 0 - 3.
ROW = {
    "input_ids": torch.tensor([[7, 3, 9, 11]]),
    "position_ids": torch.tensor([[0, 1, 2, 1]]),
    "subtree_end": torch.tensor([[4, 3, 3, 4]]),
    "use_cache": False,
}


def tree_model(kind: str, attention: str = "treepack_auto") -> Any:
    register()
    return tiny_model(kind, attention=attention).eval()


def generate(model: Any, prompts: Tensor, mask: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(1)
    ids: Tensor = model.generate(prompts, attention_mask=mask, max_new_tokens=6, pad_token_id=0, **options)
    return ids


# Types whose attention sdpa does not have: sinks, a cap of scores, keys that an indexer selects.
TWISTED: dict[str, dict[str, Any]] = {
    "gpt_oss": {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma2": {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v32": {"index_topk": 3},
}


@pytest.mark.parametrize("kind", TWISTED)
def test_sinks_caps_and_indexers_work_without_a_tree_as_in_eager_attention(kind: str) -> None:
    if kind not in transformers_types():
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    register()
    # In float32, because eager attention makes NaN of padding in float64.
    model, plain = (tiny_family(kind, attention=name, **TWISTED[kind]).float() for name in ("treepack_auto", "eager"))
    allow_generation(model)
    with torch.no_grad():
        for prompts, mask in ((PROMPTS, MASK), (PROMPTS[:1], None)):
            logits, expected = (each(input_ids=prompts, attention_mask=mask).logits for each in (model, plain))
            real = torch.ones_like(prompts, dtype=torch.bool) if mask is None else mask.bool()
            torch.testing.assert_close(logits[real], expected[real], rtol=1e-4, atol=1e-5)
    assert torch.equal(generate(model, PROMPTS, MASK), generate(plain, PROMPTS, MASK))


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_generation_equals_that_of_sdpa(kind: str, search: str) -> None:
    model, plain = tree_model(kind), tiny_model(kind).eval()
    allow_generation(model)
    for prompts, mask in ((PROMPTS, MASK), (PROMPTS[:1], MASK[:1])):
        expected = generate(plain, prompts, mask, **SEARCHES[search])
        assert expected.shape[1] > prompts.shape[1]
        assert torch.equal(generate(model, prompts, mask, **SEARCHES[search]), expected)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_a_plain_batch_equals_that_of_sdpa(kind: str) -> None:
    model, plain = tree_model(kind), tiny_model(kind).eval()
    allow_generation(model)
    # Two sequences in one row without padding: only positions show the begin of the second one.
    packed = {"input_ids": PROMPTS[:1], "position_ids": torch.tensor([[0, 1, 2, 0, 1]]), "use_cache": False}
    for batch in ({"input_ids": PROMPTS, "attention_mask": MASK}, packed):
        ours, theirs = (each(**batch, labels=batch["input_ids"]) for each in (model, plain))
        assert torch.equal(ours.loss, theirs.loss)
        assert torch.equal(ours.logits, theirs.logits)


@torch.no_grad()
def test_a_short_window_is_that_of_sdpa() -> None:
    model, plain = tree_model("qwen3"), tiny_model("qwen3").eval()
    for each in (model, plain):
        each.config.layer_types, each.config.sliding_window = ["sliding_attention", "full_attention"], 3
        each.model.has_sliding_layers = True
        for layer in each.model.layers:
            layer.self_attn.sliding_window = 3
    full = tiny_model("qwen3").eval()(PROMPTS[:1]).logits
    allow_generation(model)
    assert torch.equal(model(PROMPTS[:1]).logits, plain(PROMPTS[:1]).logits)
    assert not torch.allclose(plain(PROMPTS[:1]).logits, full)


@pytest.mark.parametrize("attention", ["treepack_reference", "treepack_flex", "treepack_auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_give_the_same_gradients_as_before(kind: str, attention: str) -> None:
    before, model = tree_model(kind, attention), tree_model(kind, attention)
    allow_generation(model)
    generate(model, PROMPTS, MASK)
    for each in (before, model):
        each(**ROW).logits.square().sum().backward()
    for old, new in zip(before.parameters(), model.parameters(), strict=True):
        assert old.grad is not None
        assert torch.equal(old.grad, new.grad)


def test_generation_before_it_is_allowed_names_the_function_that_allows_it() -> None:
    model = tree_model("qwen3")
    for mask in (None, MASK):
        assert "call treepack.allow_generation(model) before generate()" in refusal(
            model.generate, PROMPTS, attention_mask=mask, max_new_tokens=2, pad_token_id=0
        )


def test_a_mask_beside_subtree_end_is_still_refused() -> None:
    model = tree_model("qwen3")
    allow_generation(model)
    assert "attention_mask is given" in refusal(model, **ROW, attention_mask=torch.ones(1, 4, dtype=torch.long))
    # The failed call changed nothing.
    assert torch.equal(generate(model, PROMPTS, MASK), generate(tiny_model("qwen3").eval(), PROMPTS, MASK))


def test_training_without_subtree_end_is_refused() -> None:
    model = tree_model("qwen3")
    allow_generation(model)
    assert "gradients are recorded; pass subtree_end" in refusal(model, PROMPTS, attention_mask=MASK)


@torch.no_grad()
def test_a_model_that_drops_subtree_end_is_refused() -> None:
    model = tree_model("qwen3")
    forward = model.model.forward
    model.model.forward = lambda *args, subtree_end=None, **options: forward(*args, **options)
    allow_generation(model)
    assert "subtree_end did not reach this layer" in refusal(model, **ROW)
    # Its base model alone, which has hooks on its own forward pass.
    assert "subtree_end did not reach this layer" in refusal(model.model, **ROW)


@torch.no_grad()
def test_without_the_option_and_after_another_attention_plain_calls_are_refused() -> None:
    model = tree_model("qwen3")
    assert "call treepack" in refusal(model, PROMPTS)
    allow_generation(model)
    model(PROMPTS)
    model.set_attn_implementation("treepack_reference")
    assert "subtree_end did not reach this layer" in refusal(model, PROMPTS)
    assert "mask is given" in refusal(model, PROMPTS, attention_mask=MASK)
    allow_generation(model)
    allow_generation(model)
    model(PROMPTS)
    assert len(model.model._forward_pre_hooks) == 1


def test_a_copy_of_the_model_generates_too() -> None:
    model = tree_model("qwen3")
    allow_generation(model)
    assert torch.equal(generate(deepcopy(model), PROMPTS, MASK), generate(model, PROMPTS, MASK))


def test_a_model_with_adapters_generates_and_trains() -> None:
    models = []
    for model in (tree_model("qwen3"), tiny_model("qwen3").eval()):
        torch.manual_seed(3)
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # 0 at first, which would make the adapters no part of the model
                torch.nn.init.normal_(parameter.data)
        models.append(adapted.eval())
    allow_generation(models[0])
    # A keyword argument, because the method of peft takes no others.
    ours, theirs = (each.generate(input_ids=PROMPTS, attention_mask=MASK, max_new_tokens=6) for each in models)
    assert torch.equal(ours, theirs)
    assert models[0](**ROW).logits.requires_grad
    assert "gradients are recorded" in refusal(models[0], PROMPTS, attention_mask=MASK)


def test_the_option_is_not_saved(tmp_path: Path) -> None:
    model, plain = tree_model("qwen3"), tree_model("qwen3")
    allow_generation(model)
    for name, each in (("model", model), ("plain", plain)):
        each.config.save_pretrained(tmp_path / name)
    assert (tmp_path / "model" / "config.json").read_text() == (tmp_path / "plain" / "config.json").read_text()


def test_a_model_without_tree_attention_is_refused() -> None:
    assert "no part of it uses treepack's attention" in refusal(allow_generation, tiny_model("qwen3"))
