"""Models whose weights are stored quantised: refused, read as whole weights, or the base of an adapter."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException
from transformers import AutoConfig, AutoModelForCausalLM

from support.command_line import Run as Command
from support.oracle_model import packed_directory, worst_error
from support.rank_processes import Case, train_over
from support.refusal import refusal
from support.stored_models import save_stored, save_whole_model, set_quantization
from support.strategies import make
from support.tiny_vision import save_vision, tiny_vision
from treepack.data.dataset import PackedDataset
from treepack.model.adapters.adapter import assign, initial_weights
from treepack.model.adapters.lora_options import LoraOptions
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel
from treepack.model.stored_weights import check_stored, check_types, stored_arguments
from treepack.model.verify.slope import check_slope
from treepack.train.early_checks import check_scoring, check_training
from treepack.train.logprobs import open_scoring, scored_rows
from treepack.train.loop import train
from treepack.train.options import TrainOptions
from treepack.train.scoring_options import ScoreOptions
from treepack.train.setup.opening import open_run, open_verification
from treepack.train.setup.run_model import check_stored_use
from treepack.train.verification import verify_rows

LORA = LoraOptions(rank=4, targets="q_proj,v_proj")
OPTIONS = TrainOptions(device="cpu", dtype="fp32", lr=1e-2, rows_per_step=4, steps=1, attention="reference")
KINDS = {"nf4": "bitsandbytes, 4 bits", "int8": "bitsandbytes, 8 bits", "fp8": "fp8", "mxfp4": "mxfp4"}
OTHER_METHODS = ["gptq", "awq", "compressed-tensors", "hqq", "torchao", "auto-round", "some_method"]
PATHS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [1, 2, 9, 10, 11, 12]]
TREES = [make(f"t{i}", path, advantage=i - 1.0) for i, path in enumerate(PATHS)]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("stored")
    made: dict[str, Path] = {}

    def save(kind: str) -> Path:
        if kind not in made:
            made[kind] = save_whole_model(folder / kind) if kind == "whole" else save_stored(folder / kind, kind)
        return made[kind]

    return save


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_directory(tmp_path_factory.mktemp("data") / "packed", TREES, capacity=32)


@pytest.mark.parametrize("kind", KINDS)
def test_full_training_is_refused_before_weights_are_read(
    packed: Path, stored: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    source = stored(kind)
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())  # and no weights
    for check in (open_run, open_verification):
        message = refusal(check, packed, str(tmp_path), OPTIONS)
        assert message.startswith(f"{tmp_path}: its weights are quantised ({KINDS[kind]})")
        assert "give the checkpoint in bf16 of the same model" in message
        assert "--dequantize" in message
    assert refusal(check_training, [packed], str(tmp_path), OPTIONS) == message
    started = replace(OPTIONS, init_from=str(tmp_path))
    assert refusal(check_training, [packed], str(stored("whole")), started) == message
    assert refusal(open_run, packed, str(stored("whole")), started) == message


@pytest.mark.parametrize("method", OTHER_METHODS)
@pytest.mark.parametrize("place", ["quantization_config", "compression_config", "text_config"])
def test_full_training_is_refused_by_any_method_in_any_place(method: str, place: str) -> None:
    entry = {"quant_method": method}
    fields = {"text_config": {"quantization_config": entry}} if place == "text_config" else {place: entry}
    message = refusal(check_stored, "model", fields, trained=True)
    assert message == (
        f"model: its weights are quantised ({method}), so full training would leave them as they are; give the "
        "checkpoint in bf16 of the same model, train an adapter with --lora-rank"
    )
    check_stored("model", fields)  # frozen, or below an adapter
    assert "cannot be read as whole ones" in refusal(check_stored, "model", fields, dequantize=True)


def test_refusals_need_no_torch(packed: Path, stored: Callable[[str], Path]) -> None:
    code = (
        "import sys\nfrom treepack.errors import TreepackError\n"
        "from treepack.train.early_checks import check_training\nfrom treepack.train.options import TrainOptions\n"
        "try:\n    check_training(sys.argv[1:2], sys.argv[2], TrainOptions())\n"
        "except TreepackError as error:\n    print('torch' in sys.modules, error)\n"
    )
    command = [sys.executable, "-c", code, str(packed), str(stored("fp8"))]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.startswith("False ")
    assert "its weights are quantised (fp8)" in output


def test_8_bits_are_refused_for_every_use_with_the_true_reason(packed: Path, stored: Callable[[str], Path]) -> None:
    source = str(stored("int8"))
    reason = "its layers round the numbers of a token by those of the other tokens of a pass"
    assert reason in refusal(load_model, source)
    assert reason in refusal(check_scoring, packed, source)
    assert reason in refusal(open_run, packed, source, replace(OPTIONS, lora=LORA))


def test_options_that_need_whole_weights_are_refused(packed: Path, stored: Callable[[str], Path]) -> None:
    source = str(stored("nf4"))
    rounded = replace(OPTIONS, lora=replace(LORA, quantize="nf4"))
    assert "omit --quantize" in refusal(check_training, [packed], source, rounded)
    assert "omit --quantize" in refusal(load_model, source, lora=LoraOptions(quantize="nf4"))
    assert "omit --merge" in refusal(check_training, [packed], source, replace(OPTIONS, lora=replace(LORA, merge=True)))


def test_a_model_in_memory_is_refused_by_the_types_of_its_weights(stored: Callable[[str], Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(stored("nf4"), device_map={"": "cpu"})
    assert "model.layers.0.self_attn.q_proj.weight is stored as uint8" in refusal(check_types, "model", model)
    check_types("model", load_model(stored("whole")).model)
    check_types("model", load_model(stored("nf4"), lora=LORA).model)


@pytest.mark.parametrize("kind", KINDS)
def test_whole_weights_are_read_trained_and_saved(
    packed: Path, stored: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    options = replace(OPTIONS, dequantize=True, lr=0.0)
    for _ in train(open_run(packed, stored(kind), options), tmp_path / "out"):
        pass
    text, source = ((folder / "config.json").read_text() for folder in (tmp_path / "out", stored(kind)))
    assert "quantization_config" not in json.loads(text)
    one_piece_less = (source.startswith(text[:end]) and source.endswith(text[end:]) for end in range(len(text)))
    assert any(one_piece_less)
    saved = load_model(tmp_path / "out").model.state_dict()
    whole = load_model(stored(kind), dequantize=True).model.state_dict()
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert saved.keys() == whole.keys()
    assert all(torch.equal(saved[name], whole[name]) for name in whole)


def randomised(source: Path, **options: Any) -> LoadedModel:
    loaded = load_model(source, attention="reference", lora=LORA, **options)
    assign(loaded.model, initial_weights(loaded.model, 1, random_b=True), loaded.model.dtype)
    return loaded


@pytest.mark.parametrize("kind", ["nf4", "fp8", "mxfp4"])
def test_the_gradient_of_an_adapter_equals_that_over_the_dequantised_base(
    packed: Path, stored: Callable[[str], Path], kind: str
) -> None:
    from treepack.model.forward import row_loss

    found = []
    for loaded in (randomised(stored(kind)), randomised(stored(kind), dequantize=True)):
        torch.autograd.backward(row_loss(loaded, PackedDataset(packed)[0]))
        found.append({name: p.grad for name, p in loaded.model.named_parameters() if p.grad is not None})
    ours, expected = found
    assert ours.keys() == expected.keys()
    assert all(bool(gradient.any()) for gradient in expected.values())
    assert worst_error(ours, expected) < 1e-4


def test_an_adapter_over_kernels_of_a_gpu_is_refused(stored: Callable[[str], Path]) -> None:
    for kind, reason in (("fp8", "round the numbers of tokens to fp8 too"), ("mxfp4", "have no backward pass")):
        fields = json.loads((stored(kind) / "config.json").read_text())
        message = refusal(check_stored, "model", fields, on_gpu=True)
        assert f"the kernels of such layers {reason}, so gradients would be wrong" in message
        check_stored("model", fields, on_gpu=True, dequantize=True)
        loaded = load_model(stored(kind), lora=LORA)  # on a CPU they become whole weights
        check_types("model", loaded.causal)
        loaded.causal.config.quantization_config = fields["quantization_config"]
        assert reason in refusal(check_types, "model", loaded.causal)


@pytest.mark.parametrize("device", ["cuda", "xpu", "cpu"])
@pytest.mark.parametrize("kind", ["nf4", "fp8", "mxfp4"])
def test_the_device_decides_if_a_stored_base_is_refused_or_read_as_whole_weights(
    stored: Callable[[str], Path], kind: str, device: str
) -> None:
    place, options = torch.device(device), replace(OPTIONS, lora=LORA)
    config = AutoConfig.from_pretrained(stored(kind))
    stored_arguments(config, place, dequantize=False)
    assert bool(config.quantization_config.get("dequantize")) is (kind != "nf4" and device == "cpu")
    if kind != "nf4" and device != "cpu":
        assert "the kernels of such layers" in refusal(check_stored_use, str(stored(kind)), options, place)
    else:
        assert check_stored_use(str(stored(kind)), options, place)
    assert not check_stored_use(str(stored(kind)), replace(options, dequantize=True), place)
    stored_arguments(config, place, dequantize=True)
    assert bool(config.quantization_config.get("dequantize")) is (kind != "nf4")


def test_a_kernel_that_raises_in_its_backward_pass_is_refused(stored: Callable[[str], Path]) -> None:
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            raise RuntimeError("no autograd formula was registered")

    loaded = load_model(stored("nf4"), lora=LORA)
    loaded.causal.model.norm.register_forward_hook(lambda _, __, output: Raises.apply(output))  # type: ignore[no-untyped-call]
    message = refusal(check_slope, loaded)
    assert "a layer has no backward pass" in message
    assert "no autograd formula was registered" in message
    assert message.endswith("or read it as whole weights with --dequantize")


def without_backward(loaded: LoadedModel, names: str) -> LoadedModel:
    """Stop the gradient in the linear layers of `loaded` whose names end with one of `names`."""
    for name, module in loaded.causal.named_modules():
        if isinstance(module, nn.Linear) and ".lora_" not in name and name.endswith(tuple(names.split())):
            module.register_forward_hook(lambda _, __, output: output.detach())
    return loaded


BROKEN = {
    "all layers, all trained": (None, "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
    "all layers, below an adapter": (LoraOptions(rank=4), "base_layer"),
    "all other layers": (LoraOptions(rank=4, targets="down_proj"), "q_proj k_proj v_proj o_proj gate_proj up_proj"),
    "one layer": (None, "1.self_attn.v_proj"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", BROKEN)
def test_a_layer_without_a_backward_pass_is_refused(
    stored: Callable[[str], Path], case: str, dtype: torch.dtype
) -> None:
    lora, names = BROKEN[case]
    loaded = load_model(stored("whole"), dtype=dtype, lora=lora)
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    limit = 1e-3 if dtype == torch.float64 else 2e-2
    assert check_slope(loaded) is not None
    assert (check_slope(loaded) or 0.0) <= limit
    message = refusal(check_slope, without_backward(loaded, names))
    assert "has no backward pass or a wrong one; do not train this model" in message
    assert all(torch.equal(before[name], tensor) for name, tensor in loaded.model.state_dict().items())
    assert all(parameter.grad is None for parameter in loaded.model.parameters())


def test_the_padding_token_is_not_in_the_compared_trajectory(stored: Callable[[str], Path]) -> None:
    loaded = load_model(stored("whole"), dtype=torch.float64)
    loaded.causal.get_input_embeddings().padding_idx = 19  # the second token of the made-up trajectory
    assert (check_slope(loaded) or 1.0) <= 1e-3


def test_verification_and_the_opening_of_a_run_compare_the_slope(
    packed: Path, stored: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_verification(packed, stored("whole"), OPTIONS)
    rows = [run.dataset[0]]
    assert (verify_rows(run.loaded, rows).slope_error or 1.0) <= 1e-3
    assert "has no backward pass" in refusal(verify_rows, without_backward(run.loaded, "o_proj"), rows)
    options = replace(OPTIONS, lora=LORA)
    open_run(packed, stored("nf4"), options)

    from bitsandbytes.nn import Linear4bit

    product = Linear4bit.forward
    monkeypatch.setattr(Linear4bit, "forward", lambda self, x: product(self, x).detach())
    message = refusal(open_run, packed, stored("nf4"), options)
    assert "so a layer with quantised weights (bitsandbytes, 4 bits) has no backward pass" in message


def test_layers_of_4_bits_keep_the_kernel_that_has_gradients(
    stored: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    for autocast, dtype in ((None, torch.float32), (torch.bfloat16, torch.bfloat16)):
        loaded = load_model(stored("nf4"), autocast=autocast, lora=LORA)
        layers = [module for module in loaded.causal.modules() if hasattr(module, "support_avx512bf16_for_cpu")]
        assert len(layers) == 14
        assert not any(layer.support_avx512bf16_for_cpu for layer in layers)
        assert not any(getattr(layer.weight.quant_state, "packing_format_for_cpu", False) for layer in layers)
        assert {layer.compute_dtype for layer in layers} == {dtype}


@pytest.mark.parametrize("kind", ["nf4", "fp8", "mxfp4"])
def test_a_stored_model_is_scored_like_its_whole_weights(
    packed: Path, stored: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    load_model(stored(kind), dequantize=True).model.save_pretrained(tmp_path / "whole")
    options = ScoreOptions(device="cpu", dtype="fp32", attention="reference")
    scores = [
        [row.terms.old_logprob for row in scored_rows(open_scoring(packed, source, options)) if row.terms is not None]
        for source in (stored(kind), tmp_path / "whole")
    ]
    for ours, expected in zip(*scores, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_the_rule_holds_for_checkpoints_with_towers(packed: Path, tmp_path: Path) -> None:
    source = save_vision(tiny_vision("mistral3"), tmp_path / "source")
    set_quantization(source, {"quant_method": "fp8", "weight_block_size": None})
    assert "its weights are quantised (fp8), so full training" in refusal(open_run, packed, source, OPTIONS)
    whole = replace(OPTIONS, dequantize=True)
    assert "cannot be read as whole ones" in refusal(open_run, packed, source, whole)


@pytest.mark.slow
def test_two_ranks_train_what_one_process_trains_or_refuse(
    packed: Path, stored: Callable[[str], Path], tmp_path: Path
) -> None:
    whole, rows = {"dequantize": True, "rows_per_step": 2}, {"rows_per_step": 2}
    cases = [
        Case("nf4 below an adapter", packed, stored("nf4"), {**rows, "lora": LORA}),
        Case("fp8 as whole weights below an adapter", packed, stored("fp8"), {**whole, "lora": LORA}),
        Case("fp8, merged", packed, stored("fp8"), {**whole, "lora": replace(LORA, merge=True)}),
        *(Case(f"{kind} as whole weights", packed, stored(kind), whole) for kind in KINDS),
    ]
    divided = Case("divided experts", packed, stored("mxfp4"), {**whole, "expert_ranks": 2})
    ours, expected = train_over(2, tmp_path, [*cases, divided]), train_over(0, tmp_path, cases)
    expected[divided.name] = expected["mxfp4 as whole weights"]
    for case in (*cases, divided):
        folders = [Path(each[case.name]["out"]) for each in (ours, expected)]
        mine, reference = (load_file(next(folder.glob("*model.safetensors"))) for folder in folders)
        assert mine.keys() == reference.keys()
        for name, weight in reference.items():
            torch.testing.assert_close(mine[name], weight, rtol=1e-3, atol=2e-5)
        losses = [[record["loss"] for record in each[case.name]["records"]] for each in (ours, expected)]
        assert losses[0] == pytest.approx(losses[1], rel=2e-5)
    for kind in ("fp8", "mxfp4"):
        refused = Case("refused", packed, stored(kind), {**rows, "lora": LORA})
        with pytest.raises(
            ProcessRaisedException, match=rf"its weights are quantised \({kind}\), which ranks cannot sha"
        ):
            train_over(2, tmp_path, [refused])


def test_a_run_lists_weights_with_and_without_decay(
    treepack: Command, packed: Path, stored: Callable[[str], Path]
) -> None:
    done = treepack(
        "train", packed, "--model", stored("whole"), "--dry-run", "--weight-decay", "0.1", "--device", "cpu"
    )
    lines = [line for line in done.out.splitlines() if "decay" in line]
    assert re.fullmatch(r"weights with decay 0\.1 +15 \(embed_tokens, q_proj, .*down_proj\)", lines[0])
    assert re.fullmatch(r"weights without decay +9 \(q_norm, k_norm, input_layernorm, .*norm\)", lines[1])
