"""LoRA: gradients of adapters equal gradients of trajectories alone; adapters are found, read and refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

from support.oracle_model import (
    Sample,
    alone,
    gradients,
    keep_norms,
    make_row,
    packed_directory,
    tiny_config,
    tiny_model,
    worst_error,
)
from support.refusal import refusal
from support.strategies import make
from treepack import TreepackError
from treepack.data.batch import Batch, make_batch
from treepack.model.accept.vocabulary import find_config
from treepack.model.adapters.adapter import (
    assign,
    find_adapter,
    initial_weights,
    save_adapter,
)
from treepack.model.adapters.lora_options import LoraOptions
from treepack.model.experts.active import num_weights
from treepack.model.forward import row_loss
from treepack.model.layers import adapt_layers
from treepack.model.load import load_merged, load_model
from treepack.model.loaded import LoadedModel
from treepack.model.verify.gradients import verify_gradients
from treepack.train.early_checks import check_training
from treepack.train.options import TrainOptions
from treepack.train.setup.compute import ComputeSetting

SAMPLES = [
    Sample((1, 2, 3, 4, 5), (0, 1, 1, 1, 1)),
    Sample((1, 2, 3, 6, 7, 8), (0, 0, 1, 2, 1, 1)),
    Sample((1, 2, 9), (0, 1, 1)),
    Sample((1, 2, 3), (0, 0, 0.5)),
]


def row() -> Batch:
    return make_batch(make_row(SAMPLES))


def adapted(
    path: Path, kind: str = "qwen3", *, dtype: torch.dtype = torch.float64, lora: LoraOptions | None = None
) -> LoadedModel:
    """A random model with a random adapter, whose B is not 0."""
    options: dict[str, Any] = {"attention": "reference", "dtype": dtype, "lora": lora or LoraOptions(rank=3)}
    loaded = load_model(tiny_config(path / f"{kind}.json", kind), **options)
    assign(loaded.model, initial_weights(loaded.model, 1, random_b=True), dtype)
    keep_norms(loaded.causal)
    return loaded


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny_model("qwen3", dtype=torch.float32).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def saved(base: Path, **options: Any) -> Path:
    """An adapter that PEFT itself made and saved, with a random B."""
    config = {"r": 2, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **options}
    config = {"init_lora_weights": False, **config}  # False: B is random
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = peft.get_peft_model(tiny_model("qwen3", dtype=torch.float32), peft.LoraConfig(**config))
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(base.parent / "adapter", save_embedding_layers=False)
    return base.parent / "adapter"


@pytest.mark.parametrize(("kind", "checkpointing"), [("qwen3", True), ("gpt2", False)])
def test_gradients_of_an_adapter_equal_those_of_trajectories_alone(
    tmp_path: Path, kind: str, checkpointing: bool
) -> None:
    loaded = adapted(tmp_path, kind)
    adapt_layers(loaded.causal, checkpointing=checkpointing, compiled=False)
    loaded.model.train()  # recomputation works in this mode only; the embeddings are frozen
    loss = row_loss(loaded, row())
    torch.autograd.backward(loss)
    packed = gradients(loaded.model)
    loaded.causal.set_attn_implementation("sdpa")
    expected_loss, expected = alone(loaded.model.eval(), SAMPLES)
    trained = [name for name, parameter in loaded.model.named_parameters() if parameter.requires_grad]
    assert trained
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-9)
    assert all("lora_" in name and bool(expected[name].any()) for name in trained)
    assert worst_error(packed, expected) <= 1e-9


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        pytest.param({"rank_pattern": {"down_proj": 4}, "alpha_pattern": {"q_proj": 3}}, marks=pytest.mark.slow),
        {"modules_to_save": ["embed_tokens"]},
        {"lora_dropout": 0.05},
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_adapter_of_peft_is_read_with_its_weights_and_trains_exactly(base: Path, options: dict[str, Any]) -> None:
    directory = saved(base, **options)
    theirs = peft.PeftModel.from_pretrained(tiny_model("qwen3", dtype=torch.float32), str(directory)).eval()
    tokens = torch.tensor([SAMPLES[1].tokens])
    loaded = load_model(directory, attention="reference")
    loaded.causal.set_attn_implementation("sdpa")
    torch.testing.assert_close(loaded.model(tokens).logits, theirs(tokens).logits)
    loaded = load_model(directory, attention="reference", dtype=torch.float64)
    assert any("lora_dropout set to 0" in note for note in loaded.notes) is ("lora_dropout" in options)
    report = verify_gradients(loaded, [row()])
    assert report.passed, report.worst
    assert len(report.errors) == sum(p.requires_grad for p in loaded.model.parameters()) > 0


@pytest.mark.parametrize(
    "options", [{"use_dora": True}, {"use_rslora": True}, {"modules_to_save": ["embed_tokens"]}], ids=str
)
def test_a_base_in_16_bits_gives_the_same_bits_under_autocast(base: Path, options: dict[str, Any]) -> None:
    directory, tokens = saved(base, **options), torch.tensor([SAMPLES[1].tokens])
    results = []
    for lowered in (False, True):
        loaded = load_model(directory, attention="reference", autocast=torch.bfloat16)
        loaded.causal.set_attn_implementation("sdpa")
        if lowered:
            ComputeSetting(torch.device("cpu"), "bf16").lower_products(loaded.causal)
        linear = [module for module in loaded.causal.model.layers.modules() if type(module) is torch.nn.Linear]
        kept = {module.weight.dtype for module in linear}
        assert (torch.bfloat16 in kept) is (lowered and "use_dora" not in options)
        with torch.autocast("cpu", torch.bfloat16):
            logits = loaded.model(tokens).logits
        logits.float().square().sum().backward()
        results.append([logits, *(p.grad for p in loaded.model.parameters() if p.requires_grad)])
    assert all(torch.equal(mine, expected) for mine, expected in zip(*results, strict=True))


def test_a_new_adapter_changes_nothing_and_has_the_same_weights_in_every_dtype(base: Path) -> None:
    single, double = (
        load_model(base, dtype=dtype, lora=LoraOptions(rank=3)) for dtype in (torch.float32, torch.double)
    )
    plain = load_model(base)
    for loaded in (single, plain):
        loaded.causal.set_attn_implementation("sdpa")
    tokens = torch.tensor([SAMPLES[1].tokens])
    assert torch.equal(single.model(tokens).logits, plain.model(tokens).logits)
    pairs = zip(single.model.named_parameters(), double.model.named_parameters(), strict=True)
    trained = [(name, a, b) for (name, a), (_, b) in pairs if a.requires_grad]
    assert len(trained) == 2 * 7 * 2  # A and B of seven linear layers, twice
    for name, a, b in trained:
        assert torch.equal(a.double(), b), name
        assert bool(a.any()) is ("lora_A" in name)


def test_a_merged_model_computes_what_base_and_adapter_compute(base: Path, tmp_path: Path) -> None:
    loaded = load_model(base, lora=LoraOptions(rank=3, targets="q_proj, layers.1.mlp.up_proj"))
    assign(loaded.model, initial_weights(loaded.model, 1, random_b=True), torch.float32)
    save_adapter(loaded.model, tmp_path / "adapter", None)
    merged = load_merged(str(base), tmp_path / "adapter", seed=0)
    assert not any("lora" in name for name, _ in merged.named_parameters())
    loaded.causal.set_attn_implementation("sdpa")
    merged.set_attn_implementation("sdpa")
    tokens = torch.tensor([SAMPLES[1].tokens])
    torch.testing.assert_close(merged(tokens).logits, loaded.model(tokens).logits)


def test_a_new_adapter_makes_no_warning(base: Path, recwarn: pytest.WarningsRecorder) -> None:
    load_model(base, lora=LoraOptions(rank=3))
    assert [str(warning.message) for warning in recwarn] == []


def test_targets_choose_layers_by_the_ends_of_their_names(base: Path) -> None:
    loaded = load_model(base, lora=LoraOptions(rank=3, targets="q_proj, layers.1.mlp.up_proj"))
    layers = [name.removesuffix(".lora_A.default") for name, _ in loaded.causal.named_modules() if "lora_A.d" in name]
    q_proj = [f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)]
    assert sorted(layers) == sorted([*q_proj, "model.layers.1.mlp.up_proj"])


def test_routers_have_no_adapter_unless_all_linear_layers_have_one(tmp_path: Path) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up_proj = nn.Linear(4, 2), nn.Linear(4, 4)

    def targets(choice: str) -> list[str] | str:
        loaded = load_model(tiny_config(tmp_path / "tiny.json"))
        for layer in loaded.causal.model.layers:
            layer.router_and_more = Layer()
        from treepack.model.adapters.adapter_targets import find_targets

        return find_targets(loaded.causal, choice, "tiny").modules

    both = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert set(targets("auto")) == both
    assert set(targets("all-linear")) == both | {"gate"}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"dropout": 0.05}, "lora_dropout is 0.05, but a token shared by branches has one hidden state"),
        ({"merge": True, "quantize": "nf4"}, "merge is not possible over a base of 4 bits"),
        ({"quantize": "int8"}, "quantize is 'int8'; expected one of nf4"),
        ({"rank": 0}, "rank is 0; expected at least 1"),
        ({"rank": "x"}, "rank is 'x'; expected a whole number"),
        ({"rank": None, "alpha": 8.0}, "give lora_rank too"),
        ({"alpha": 0.0}, "lora_alpha is 0.0; expected a positive number"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(TreepackError, match=complaint):
        LoraOptions(**{"rank": 2, **options})


@pytest.mark.parametrize(
    ("targets", "complaint"),
    [
        ("q_proj,query", "no linear layer or expert is named 'query'; its names are down_proj, gate_proj, .*v_proj"),
        ("lm_head", "lm_head is the output layer, which must have no adapter"),
    ],
)
def test_targets_that_cannot_be_are_refused(tmp_path: Path, targets: str, complaint: str) -> None:
    with pytest.raises(TreepackError, match=complaint):
        load_model(tiny_config(tmp_path / "tiny.json"), lora=LoraOptions(rank=2, targets=targets))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, "output layer is a peft.tuners.lora.layer.Linear.* adapter on it"),
        ({"modules_to_save": ["lm_head"]}, "output layer is a peft.utils.other.ModulesToSaveWrapper.* adapter on it"),
        ({"trainable_token_indices": [1]}, "its adapter uses trainable_token_indices, which treepack does not support"),
        ({"lora_bias": True}, "its adapter uses lora_bias"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "its adapter uses layer_replication"),
        ({"init_lora_weights": "pissa"}, "its adapter starts with 'pissa', which changes the base model"),
    ],
)
def test_kinds_of_lora_that_cannot_be_are_refused_by_name(base: Path, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(TreepackError, match=complaint):
        load_model(saved(base, **options))


def test_other_kinds_of_adapters_are_refused_by_name(base: Path) -> None:
    config = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_model("qwen3", dtype=torch.float32), config)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(base.parent / "ia3")
    assert "is an adapter of the kind IA3; expected LORA" in refusal(load_model, base.parent / "ia3")


def test_an_adapter_that_does_not_fit_its_base_is_refused(base: Path) -> None:
    directory = saved(base)
    config = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps({**config, "r": 3}))
    with pytest.raises(TreepackError, match=r"lora_A.weight has the shape \[2, \d+\] in the adapter and \[3, \d+\]"):
        load_model(directory)
    (directory / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["q_proj"]}))
    with pytest.raises(TreepackError, match=r"the model has no base_model.*down_proj.lora_A.weight"):
        load_model(directory)
    (directory / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    assert "names no base model" in refusal(load_model, directory)


def test_a_second_adapter_is_refused_and_a_whole_model_has_none(base: Path) -> None:
    assert find_adapter(base) is None
    assert "contains an adapter, which training continues; leave out lora_rank" in refusal(
        load_model, saved(base), lora=LoraOptions(rank=2)
    )


def four_bits(base: Path) -> LoadedModel:
    loaded = load_model(base, attention="reference", lora=LoraOptions(rank=3, quantize="nf4"))
    assign(loaded.model, initial_weights(loaded.model, 1, random_b=True), torch.float32)
    return loaded


def rounded_base(loaded: LoadedModel, base: Path) -> LoadedModel:
    """The model of `loaded` in float64, with the rounded weights of its base as ordinary numbers."""
    from bitsandbytes.functional import dequantize_4bit

    exact = load_model(base, attention="reference", dtype=torch.float64, lora=LoraOptions(rank=3))
    parameters = dict(loaded.model.named_parameters())
    for name, parameter in exact.model.named_parameters():
        mine: Any = parameters[name]
        state = getattr(mine, "quant_state", None)
        parameter.data = (mine.data if state is None else dequantize_4bit(mine.data, state)).double()
    keep_norms(exact.causal)
    return exact


@pytest.mark.usefixtures("any_width")
def test_over_4_bits_the_error_is_at_most_twice_the_rounding_of_trajectories_alone(base: Path) -> None:
    loaded = four_bits(base)
    quantized = [parameter for parameter in loaded.model.parameters() if hasattr(parameter, "quant_state")]
    assert len(quantized) == 14
    assert sum(map(num_weights, quantized)) == 2 * sum(parameter.numel() for parameter in quantized)
    torch.autograd.backward(row_loss(loaded, row()))
    packed = gradients(loaded.model)
    loaded.causal.set_attn_implementation("sdpa")
    _, single = alone(loaded.model, SAMPLES)
    exact = rounded_base(loaded, base)
    exact.causal.set_attn_implementation("sdpa")
    _, expected = alone(exact.model, SAMPLES)
    trained = [name for name, parameter in loaded.model.named_parameters() if parameter.requires_grad]

    def error(actual: dict[str, torch.Tensor]) -> float:
        parts = [(actual[name].double() - expected[name]).norm() for name in trained]
        return float(torch.stack(parts).norm() / torch.stack([expected[name].norm() for name in trained]).norm())

    assert 0 < error(packed) <= 2 * error(single) < 1e-5


@pytest.mark.usefixtures("any_width")
def test_an_adapter_over_4_bits_is_read_again_over_4_bits(base: Path, tmp_path: Path) -> None:
    loaded = four_bits(base)
    save_adapter(loaded.model, tmp_path / "adapter", None)
    again = load_model(tmp_path / "adapter", attention="reference", lora=LoraOptions(quantize="nf4"))
    over_whole = load_model(tmp_path / "adapter", attention="reference")
    losses = [row_loss(each, row()).item() for each in (loaded, again, over_whole)]
    assert losses[0] == losses[1] != losses[2]


def test_random_weights_and_float64_have_no_4_bits(base: Path, tmp_path: Path) -> None:
    lora = LoraOptions(rank=2, quantize="nf4")
    assert "is a config file; quantize needs the directory of a model" in refusal(
        load_model, tiny_config(tmp_path / "tiny.json"), lora=lora
    )
    assert "a base of 4 bits has no products in float64" in refusal(load_model, base, dtype=torch.float64, lora=lora)


@pytest.mark.parametrize(("package", "extra"), [("peft", "lora"), ("bitsandbytes", "bitsandbytes")])
def test_a_missing_package_is_one_sentence_with_its_command(
    base: Path, monkeypatch: pytest.MonkeyPatch, package: str, extra: str
) -> None:
    monkeypatch.setattr(
        "treepack.model.adapters.lora_options.find_spec", lambda name: None if name == package else object()
    )
    assert f"needs {package}, which is not installed; run pip install '{package}>=" in refusal(
        load_model, base, lora=LoraOptions(rank=2, quantize="nf4")
    )


def test_a_missing_package_is_refused_before_torch_is_imported(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = packed_directory(tmp_path / "packed", [make("a", [1, 2, 3])], capacity=8)
    monkeypatch.setattr("treepack.model.adapters.lora_options.find_spec", lambda name: None)
    assert "LoRA needs peft, which is not installed" in refusal(
        check_training, [packed], str(base), TrainOptions(lora=LoraOptions(rank=2))
    )


@pytest.mark.parametrize("place", ["runs/adapter/models/base", "runs/models/base", "models/base"])
def test_a_relative_base_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    adapter, base, other = tmp_path / "runs" / "adapter", tmp_path / place, tmp_path / "other"
    for folder in (adapter, base, other):
        folder.mkdir(parents=True, exist_ok=True)
    (base / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 7}))
    config = {"peft_type": "LORA", "base_model_name_or_path": "models/base"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    monkeypatch.chdir(other)
    for source in (adapter, Path("../runs/adapter")):
        found = find_adapter(source)
        assert found is not None
        assert Path(found.base).resolve() == base
        assert (find_config(str(source)) or {})["vocab_size"] == 7
    (base / "config.json").unlink()
    missing = find_adapter(adapter)
    assert missing is not None
    assert missing.base == "models/base"
