"""Models that can be trained exactly load; all others are refused by their configuration or by the probe."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from support import interpreter  # noqa: F401
from support.oracle_model import CONFIGS, VOCABULARY, Sample, make_row, tiny_config, tiny_model
from support.refusal import refusal
from treepack.attention import register
from treepack.data.batch import make_batch
from treepack.errors import TreepackError
from treepack.model.accept.compatibility import check_fits
from treepack.model.accept.probe import probe
from treepack.model.forward import hidden_states, row_loss
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel

SAMPLES = [Sample((1, 2, 3), (0.0, 1.0, 1.0)), Sample((1, 2, 4, 5), (0.0, 0.0, 1.0, 1.0))]
MANIFEST: dict[str, Any] = {"max_token_id": VOCABULARY - 1, "tokenizer": None}


# The kernels, slow in Triton's interpreter, do not see the architecture: an old and a new one are enough.
@pytest.mark.parametrize(
    ("kind", "attention"),
    [*itertools.product(sorted(CONFIGS), ["reference", "flex"]), ("gpt2", "triton"), ("qwen3", "triton")],
)
def test_a_config_file_gives_seeded_weights_and_every_branch_its_own_states(
    tmp_path: Path, kind: str, attention: str
) -> None:
    path = tiny_config(tmp_path / "config.json", kind)
    loaded = load_model(path, attention=attention, seed=3)
    again, other = load_model(path, seed=3), load_model(path, seed=4)
    weights = [m.model.get_input_embeddings().weight for m in (loaded, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    states = hidden_states(loaded, make_batch(make_row(SAMPLES), multiple=8))
    # The row is 1 2 3 | 4 5 padded to 8: the second trajectory 1 2 4 5 has the row indices 0, 1, 3, 4.
    loaded.model.set_attn_implementation("sdpa")
    alone = loaded.model.base_model(input_ids=torch.tensor([[1, 2, 4, 5]]))[0][0]
    torch.testing.assert_close(states[[0, 1, 3, 4]], alone, rtol=1e-4, atol=1e-5)


def test_a_saved_directory_loads_with_its_weights(tmp_path: Path) -> None:
    model = tiny_model("llama", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.attention == "reference"
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], weight)


def test_a_loaded_model_samples_under_another_attention_and_trains_again(tmp_path: Path) -> None:
    ready = load_model(tiny_config(tmp_path / "config.json"))
    batch, prompt = make_batch(make_row(SAMPLES)), torch.tensor([[1, 2]])
    before = row_loss(ready, batch)
    # transformers 5.10 builds a mask before it calls the first layer.
    sentence = r"call treepack.allow_generation\(model\) before generate\(\)|attention_mask is given"
    with pytest.raises(TreepackError, match=sentence):
        ready.model.generate(prompt, max_new_tokens=2)
    ready.model.set_attn_implementation("sdpa")
    assert ready.model.generate(prompt, max_new_tokens=3, do_sample=False).shape == (1, 5)
    assert "switch back with model.set_attn_implementation('treepack_reference')" in refusal(row_loss, ready, batch)
    ready.model.set_attn_implementation(f"treepack_{ready.attention}")
    assert torch.equal(row_loss(ready, batch), before)


def test_random_weights_leave_the_callers_random_state_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    load_model(tiny_config(tmp_path / "config.json"))
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_is_set_to_zero_with_a_note(tmp_path: Path) -> None:
    path = tiny_config(tmp_path / "config.json", "gpt2", attn_pdrop=0.1, resid_pdrop=0.2, embd_pdrop=0.0)
    loaded = load_model(path)
    assert [note.split()[0] for note in loaded.notes if "first" not in note] == ["attn_pdrop", "resid_pdrop"]
    whole = load_model(tiny_config(tmp_path / "whole.json", attention_dropout=1))
    assert whole.model.config.attention_dropout == 0
    assert all(m.p == 0 for m in loaded.model.transformer.modules() if isinstance(m, nn.Dropout))


SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 4}
# Model type, configuration and part of the message: refused by check_config, by the probe, or because it cannot load.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("minimax", {**GROUPED, "num_hidden_layers": 4}, "layer 1 is 'linear_attention', which carries a state"),
    (
        "mamba",
        {"hidden_size": 16, "num_hidden_layers": 2},
        "its layers compute a selective scan, which has no form on trees",
    ),
    ("bert", SMALL, "not causal|tree attention|alone"),
    ("no_such_model", {}, "cannot load"),
]


@pytest.mark.parametrize(("kind", "fields", "message"), REFUSED, ids=[kind for kind, *_ in REFUSED])
def test_models_that_cannot_be_trained_exactly_are_refused_in_a_sentence(
    tmp_path: Path, kind: str, fields: dict[str, Any], message: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, "vocab_size": VOCABULARY, "pad_token_id": None, **fields}))
    with pytest.raises(TreepackError, match=message) as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[1]", '"x"', "{}", '{"model_type": 3}'])
def test_a_config_without_a_model_type_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "list.json"
    path.write_text(text)
    assert "list.json: has no model_type; expected" in refusal(load_model, path)


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": "big"},
        {"num_key_value_heads": 3},
        {"pad_token_id": 99},
        {"rope_parameters": "x"},
        {"head_dim": 3},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_whatever_a_models_code_raises_is_one_short_sentence(tmp_path: Path, fields: dict[str, Any]) -> None:
    path = tiny_config(tmp_path / "config.json", **fields)
    with pytest.raises(TreepackError, match=r"config\.json") as caught:
        load_model(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(path))


@pytest.mark.parametrize("damage", ["missing", "mismatched"])
def test_a_checkpoint_without_all_its_weights_is_refused(tmp_path: Path, damage: str) -> None:
    model = tiny_model("llama", dtype=torch.float32)
    weights = model.state_dict()
    norm = weights.pop("model.norm.weight")
    if damage == "mismatched":
        weights["model.norm.weight"] = norm[:3].clone()
    model.save_pretrained(tmp_path, state_dict=weights)
    assert f"model.norm.weight is {damage} in its weights" in refusal(load_model, tmp_path)


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    load_model(tiny_config(tmp_path / "tied.json", tie_word_embeddings=True)).model.save_pretrained(tmp_path / "out")
    assert load_model(tmp_path / "out").model.config.tie_word_embeddings


def test_positions_beyond_a_table_are_refused(tmp_path: Path) -> None:
    fields = {"n_embd": 16, "n_layer": 2, "n_head": 2, "dff": 24, "n_positions": 20}
    path = tmp_path / "ctrl.json"
    path.write_text(json.dumps({"model_type": "ctrl", "vocab_size": VOCABULARY, **fields}))
    tokens = tuple(range(30))
    row = make_batch(make_row([Sample(tokens, (0.0,) + (1.0,) * 29)], row_id=7))
    try:
        ready = load_model(path)
    except TreepackError:
        pytest.skip(f"ctrl of transformers {transformers.__version__} has attention of its own")
    assert "cannot run row 7, whose positions reach 29" in refusal(hidden_states, ready, row)


def test_a_row_with_an_id_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    loaded = load_model(tiny_config(tmp_path / "config.json"))
    row = make_batch(make_row([Sample((1, VOCABULARY, 2), (0.0, 1.0, 1.0))]))
    sentence = f"the data holds the token id {VOCABULARY} and the vocabulary ends at {VOCABULARY - 1}; use the model"
    with pytest.raises(TreepackError, match=sentence):
        row_loss(loaded, row)


def test_files_that_are_no_model_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for source in (tmp_path, broken):
        with pytest.raises(TreepackError, match=r"malformed JSON|contains no model"):
            load_model(source)
    assert "missing.json: no such file or folder; give the folder of a model" in refusal(
        load_model, tmp_path / "missing.json"
    )


class Smear(nn.Module):
    """A layer that mixes each token with the token before it in the row, like a convolution."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.inner(hidden + 0.1 * hidden.roll(1, dims=1))
        return mixed


def test_the_probe_finds_tokens_that_mix_outside_attention() -> None:
    register()
    model = tiny_model("qwen3", attention="treepack_reference")
    probe(model, source="m")
    model.model.layers[1].mlp = Smear(model.model.layers[1].mlp)
    assert "a branch in a tree gets other hidden states" in refusal(probe, model, source="m")
    assert model.config._attn_implementation == "treepack_reference"  # restored, although the probe failed


def test_the_probe_finds_a_layer_that_attends_twice() -> None:
    register()
    model = tiny_model("qwen3", attention="treepack_reference")
    model.model.layers[1].self_attn = model.model.layers[0].self_attn  # two calls, but from one module
    assert "2 attention layers call attention 2 times, from 1 modules" in refusal(probe, model, source="m")


def loaded(kind: str, **fields: Any) -> LoadedModel:
    register()
    model = tiny_model(kind)
    for name, value in fields.items():
        setattr(model.config, name, value)
    return LoadedModel(model, kind, "reference", ())


def test_data_that_suits_the_model_is_accepted() -> None:
    check_fits(loaded("qwen3"), **MANIFEST, max_position=10**6)  # rotary positions have no limit
    check_fits(loaded("gpt2"), **MANIFEST, max_position=255)  # a table of 256 positions
    check_fits(loaded("llama", sliding_window=128), **MANIFEST, max_position=10**6)  # a window has no limit either
    check_fits(loaded("qwen3", index_topk=257), **MANIFEST, max_position=256)


@pytest.mark.parametrize(
    ("kind", "fields", "entries", "message"),
    [
        ("qwen3", {}, {"max_token_id": VOCABULARY}, "the token id 50 and the vocabulary ends at 49"),
        (
            "gpt2",
            {},
            {},
            "path of 257 tokens, .* exact on paths of up to 256, because its positions are a learned table",
        ),
        ("qwen3", {"index_topk": 256}, {}, "its indexer selects 256 keys .* truncate the trajectories to 256 tokens"),
        # The shortest limit counts.
        ("gpt2", {"index_topk": 200}, {}, "truncate the trajectories to 200 tokens"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic"}, "max_position_embeddings": 100},
            {},
            "dynamic rotary frequencies",
        ),
    ],
)
def test_data_that_does_not_suit_the_model_is_refused(
    kind: str, fields: dict[str, Any], entries: dict[str, Any], message: str
) -> None:
    with pytest.raises(TreepackError, match=message):
        check_fits(loaded(kind, **fields), **{**MANIFEST, **entries}, max_position=256)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from treepack.tokenise.tokenization import fingerprint

    tokenizers = [
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="a")))
        for words in ({"a": 0, "b": 1}, {"a": 1, "b": 0})
    ]
    model = tiny_model("qwen3", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    tokenizers[0].save_pretrained(tmp_path)
    ready = load_model(tmp_path)
    check_fits(ready, **{**MANIFEST, "tokenizer": fingerprint(tokenizers[0])}, max_position=1)
    assert "its tokenizer is not the one that made the data" in refusal(
        check_fits, ready, **{**MANIFEST, "tokenizer": fingerprint(tokenizers[1])}, max_position=1
    )
