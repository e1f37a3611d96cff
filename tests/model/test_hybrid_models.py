"""Models with recurrent layers: hard rows, objectives, recomputation, adapters, precision, checkpoints, generation."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from support.hybrid_models import HARD, SAMPLES, TRUNK, load_hybrid, options_of, write_config
from support.model_table import ACCEPTED
from support.oracle_model import alone, gradients, worst_error, write_rows
from support.packed_objectives import as_trajectories, opened, rollouts
from support.rank_processes import Case, train_over
from support.refusal import refusal
from support.tiny_families import HAS_RECURRENT, KeepFloat64, tiny_family
from support.tiny_vision import read_weights
from treepack import allow_generation
from treepack.attention import register
from treepack.integrations.tree_model import check_model, use_tree_attention
from treepack.model.accept.compatibility import check_config
from treepack.model.adapters.adapter import assign, initial_weights
from treepack.model.adapters.lora_options import LoraOptions
from treepack.model.collation import batch_loss, collate
from treepack.model.forward import row_loss
from treepack.model.layers import adapt_layers
from treepack.model.load import build_empty, load_model, read_config
from treepack.model.loaded import LoadedModel
from treepack.model.verify.gradients import verify_gradients
from treepack.model.weights.files import weight_files
from treepack.model.weights.reading import find_plan
from treepack.model.weights.writing import saved_weights
from treepack.objectives.denominators import step_factors, trajectory_table
from treepack.objectives.objective import choose_objective

pytestmark = pytest.mark.skipif(not HAS_RECURRENT, reason="this version of transformers has other recurrent layers")

# One of each scan, and one without a scan. The test of adapters has one in which attention and a scan share a layer.
QUICK = ["qwen3_5_text", "kimi_linear", "granitemoehybrid", "lfm2"]
NAMES = [each.kind for each in ACCEPTED if each.recurrent]
HYBRIDS = [pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.slow]) for kind in NAMES]
# A delta rule, Mamba-2, and a convolution alone.
SOME_NAMES = ["qwen3_5_text", "granitemoehybrid", "lfm2"]
SOME = [SOME_NAMES[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in SOME_NAMES[1:])]


@pytest.mark.parametrize("kind", HYBRIDS)
def test_ends_inside_nodes_nodes_of_one_token_and_padding_are_exact(tmp_path: Path, kind: str) -> None:
    loaded = load_hybrid(tmp_path, kind)
    assert int(HARD.position_ids.max()) > 2 * max(taps(loaded.model))
    report = verify_gradients(loaded, [HARD])
    assert report.passed, report.worst
    assert report.worst[1] < 1e-10


def taps(model: nn.Module) -> list[int]:
    return [module.kernel_size[0] for module in model.modules() if isinstance(module, nn.Conv1d)]


@pytest.mark.parametrize("kind", SOME)
def test_an_objective_over_terms_is_exact(tmp_path: Path, kind: str) -> None:
    loaded = load_hybrid(tmp_path, kind)
    objective = choose_objective("grpo", entropy=0.1)
    dataset = opened(tmp_path / "packed", rollouts(count=6), [0, 1] * 3)
    factors = [torch.from_numpy(each) for each in step_factors(trajectory_table(dataset, objective), [0, 1], objective)]
    report = verify_gradients(loaded, [dataset[0], dataset[1]], objective=objective, factors=factors)
    assert report.passed, report.worst


def of_row(loaded: LoadedModel) -> dict[str, Tensor]:
    """Return the gradient of the hard row's loss by every parameter."""
    loaded.model.zero_grad()
    torch.autograd.backward(row_loss(loaded, HARD))
    return gradients(loaded.model)


@pytest.mark.parametrize("kind", SOME)
def test_recomputation_in_training_mode_changes_no_gradient(tmp_path: Path, kind: str) -> None:
    loaded = load_hybrid(tmp_path, kind)
    expected = of_row(loaded)
    loaded.model.train()  # Mamba-2 layers then call their fused function first
    assert worst_error(of_row(loaded), expected) == 0
    adapt_layers(loaded.model, checkpointing=True, compiled=False)
    assert worst_error(of_row(loaded), expected) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "checkpointing"), [("qwen3_next", True), ("lfm2", False)])
def test_compiled_layers_have_the_same_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, checkpointing: bool
) -> None:
    torch._dynamo.reset()
    # Graphs run as they are traced; turning them into machine code takes minutes.
    traced = functools.partial(torch.compile, backend=lambda graph, _: graph.forward)
    monkeypatch.setattr(torch, "compile", traced)
    loaded = load_hybrid(tmp_path, kind)
    loaded.model.train()
    expected = of_row(loaded)
    adapt_layers(loaded.model, checkpointing=checkpointing, compiled=True)
    assert worst_error(of_row(loaded), expected) < 1e-10
    torch._dynamo.reset()


TARGETS = {
    # PEFT would take names of the shared expert for names of the experts.
    "qwen3_next": "in_proj_ba in_proj_qkvz k_proj o_proj out_proj q_proj v_proj",
    # PEFT puts no adapters on the out_proj of this type, because a fused kernel of mamba-ssm reads its weights.
    "falcon_h1": "down_proj gate_proj in_proj k_proj o_proj q_proj up_proj v_proj",
    "nemotron_h": "down_proj in_proj k_proj o_proj q_proj up_proj v_proj",
    "lfm2": "in_proj k_proj out_proj q_proj v_proj w1 w2 w3",
}


@pytest.mark.parametrize(
    "kind", ["falcon_h1", *(pytest.param(kind, marks=pytest.mark.slow) for kind in TARGETS if kind != "falcon_h1")]
)
def test_adapters_are_on_the_products_of_recurrent_layers_and_exact(tmp_path: Path, kind: str) -> None:
    options: dict[str, Any] = {"dtype": torch.float64, "lora": LoraOptions(rank=2)}
    loaded = load_model(write_config(tmp_path, kind), **options)
    assert set(loaded.model.peft_config["default"].target_modules) == set(TARGETS[kind].split())
    assign(loaded.model, initial_weights(loaded.model, 1, random_b=True), torch.float64)
    frozen = {name.rpartition(".")[2] for name, p in loaded.model.named_parameters() if not p.requires_grad}
    assert frozen.issuperset({"A_log", "dt_bias"} if kind != "lfm2" else {"weight"})
    assert all("lora_" in name for name, p in loaded.model.named_parameters() if p.requires_grad)
    report = verify_gradients(loaded, [HARD])
    assert report.passed, report.worst


@pytest.mark.parametrize("kind", SOME)
def test_autocast_computes_the_loss_of_float32(tmp_path: Path, kind: str) -> None:
    loaded = load_hybrid(tmp_path, kind, dtype=torch.float32)
    expected = float(row_loss(loaded, HARD).detach())
    with torch.autocast("cpu", torch.bfloat16):
        loss = row_loss(loaded, HARD)
    torch.autograd.backward(loss)
    assert loss.item() == pytest.approx(expected, rel=2e-2)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in loaded.model.parameters())


@pytest.mark.parametrize("kind", SOME)
def test_a_model_under_tree_attention_generates_as_the_plain_model(kind: str) -> None:
    prompts = torch.tensor([[0, 0, *TRUNK[:3]], [*TRUNK[3:8]]])
    mask = (prompts > 0).long()
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    plain = tiny_family(kind, attention="sdpa", **options_of(kind)).float()
    expected = plain.generate(prompts, **options)
    register()
    model = tiny_family(kind, attention="treepack_auto", **options_of(kind)).float()
    loaded = LoadedModel(model, kind, "auto", ())
    torch.autograd.backward(row_loss(loaded, HARD))  # from here on the functions of its module are replaced
    allow_generation(model)
    assert torch.equal(model.generate(prompts, **options), expected)
    assert torch.equal(plain.generate(prompts, **options), expected)
    # A call that records gradients is refused as before, so that none can forget subtree_end.
    assert "subtree_end did not reach this layer" in refusal(model, input_ids=prompts, attention_mask=mask)


@pytest.mark.parametrize("kind", SOME)
def test_a_model_that_treepack_did_not_load_has_the_gradients_of_trajectories_alone(kind: str) -> None:
    register()
    model = tiny_family(kind, attention="treepack_auto", **options_of(kind))
    check_model(model)
    use_tree_attention(model, torch.device("cpu"), None)
    with KeepFloat64():
        torch.autograd.backward(batch_loss(model.train(), collate([HARD])))
        loss, expected = alone(tiny_family(kind, **options_of(kind)), SAMPLES)
    assert float(loss) > 0
    assert worst_error(gradients(model), expected) < 1e-9


@pytest.mark.parametrize("kind", ["kimi_linear", "nemotron_h"])
def test_weights_are_read_and_written_tensor_by_tensor(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "source"
    plain = tiny_family(kind, **options_of(kind)).float()
    plain.save_pretrained(source)
    config, _ = read_config(source)
    files = weight_files(source)
    assert files is not None
    assert find_plan(build_empty(source, config, torch.float32), files, kind) is not None
    model = load_model(source).model
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())
    weights = saved_weights(model)
    assert weights is not None
    weights.write(tmp_path)
    before, after = read_weights(source), read_weights(tmp_path)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


# The default configuration of Qwen 4 has no indexer.
@pytest.mark.parametrize(("kind", "fields"), [("glm5_next", {}), ("qwen4_exp", {"indexer_budget": 64})])
def test_an_indexer_that_selects_pools_of_keys_is_refused_by_name(kind: str, fields: dict[str, int]) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    config = AutoConfig.for_model(kind).get_text_config()
    for name, value in fields.items():
        setattr(config, name, value)
    assert "its indexer selects pools of keys" in refusal(check_config, config, source="m")


def test_layers_for_the_prediction_of_several_tokens_are_not_read(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tiny_family("qwen3_next", **options_of("qwen3_next")).float().save_pretrained(source)
    tensors = read_weights(source)
    predictor = {"mtp.fc.weight": torch.randn(32, 64), "mtp.layers.0.input_layernorm.weight": torch.randn(32)}
    save_file({**tensors, **predictor}, source / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(source)
    assert not any("mtp" in name for name in loaded.model.state_dict())
    weights = saved_weights(loaded.model)
    assert weights is not None
    weights.write(tmp_path)
    assert read_weights(tmp_path).keys() == tensors.keys()


@pytest.mark.slow
def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    kinds = ("qwen3_5_text", "nemotron_h")
    packed = write_rows(tmp_path / "packed", as_trajectories(rollouts()), [0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    models = {}
    for kind in kinds:
        tiny_family(kind, **options_of(kind)).float().save_pretrained(tmp_path / kind)
        models[kind] = tmp_path / kind
    cases = [Case(kind, packed, model, {"steps": 2, "dtype": "fp32"}) for kind, model in models.items()]
    cases.append(Case("adapter", packed, models["nemotron_h"], {"steps": 2, "lora": LoraOptions(rank=2)}))
    one, two = (train_over(size, tmp_path, cases) for size in (0, 2))
    for case in cases:
        expected, actual = (run[case.name]["gradients"] for run in (one, two))
        trained = {name: tensor for name, tensor in expected.items() if tensor is not None}
        # float32: rounding of sums in another order, and of the weights after the first step
        assert worst_error({name: actual[name] for name in trained}, trained) < 1e-3, case.name
        losses = [[record["loss"] for record in run[case.name]["records"]] for run in (one, two)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
