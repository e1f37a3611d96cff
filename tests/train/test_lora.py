"""Training of LoRA adapters: written, resumed and merged; over several ranks; `--verify` and `logprobs`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from support.command_line import Run
from support.oracle_model import packed_directory, tiny_config, tiny_model
from support.rank_processes import Case, train_over
from support.refusal import refusal
from support.strategies import make
from treepack import TreepackError
from treepack.model.adapters.lora_options import LoraOptions
from treepack.model.load import load_model
from treepack.research.predictor.model import start_values
from treepack.train.loop import train
from treepack.train.options import TrainOptions
from treepack.train.setup.compute import ComputeSetting
from treepack.train.setup.opening import open_run
from treepack.train.step import StepMetrics

OPTIONS = TrainOptions(device="cpu", lr=1e-2, rows_per_step=2, epochs=2, checkpoint_every=0, warmup_steps=1)
LORA = LoraOptions(rank=3)
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TIMES = ("seconds", "wait_seconds", "slowest_pass", "tokens_per_second", "tokens_flat_per_second")
TOKENS = torch.tensor([[1, 2, 3, 4, 5]])


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    rollouts = [
        make(
            f"t{i}",
            [i // 3, *range(9), 5, *generator.integers(20, 24, 8).tolist()],
            reward=float(i % 2),
            advantage=i % 2 - 0.5,
        )
        for i in range(12)
    ]
    return packed_directory(tmp_path / "packed", rollouts, capacity=40)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny_model("qwen3", dtype=torch.float32).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def go(packed: Path, model: Path, out: Path, *, until: int | None = None, **changes: Any) -> list[StepMetrics]:
    """Start or resume a run like a new process, up to step `until`; return its steps."""
    run = open_run(packed, model, replace(OPTIONS, **{"lora": LORA, **changes}))
    steps: list[StepMetrics] = []
    for metrics in train(run, out, resume=True, stop=lambda: len(steps) + 1 == until):
        steps.append(metrics)
        torch.rand(3)  # the caller may draw random numbers between steps
    return steps


def weights_of(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "adapter_model.safetensors")


def test_a_run_lowers_the_loss_and_writes_an_adapter_for_peft(packed: Path, base: Path, tmp_path: Path) -> None:
    steps = go(packed, base, tmp_path / "out", epochs=4)
    assert steps[-1].loss < steps[0].loss
    notes = json.loads((tmp_path / "out" / "train.json").read_text())["notes"]
    assert "an adapter of 1,392 weights is trained, 0.2 of all" in notes
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == set(
        "adapter_config.json adapter_model.safetensors checkpoints metrics.jsonl run.json train.json".split()
    )
    theirs = peft.PeftModel.from_pretrained(tiny_model("qwen3", dtype=torch.float32), str(tmp_path / "out")).eval()
    assert theirs.peft_config["default"].base_model_name_or_path == str(base)
    loaded = load_model(tmp_path / "out", attention="reference")
    loaded.causal.set_attn_implementation("sdpa")
    torch.testing.assert_close(loaded.model(TOKENS).logits, theirs(TOKENS).logits, rtol=1e-4, atol=1e-5)
    plain = tiny_model("qwen3", dtype=torch.float32)(TOKENS).logits
    assert not torch.allclose(theirs(TOKENS).logits, plain, atol=1e-2), "the adapter has an effect"
    options = json.loads((tmp_path / "out" / "train.json").read_text())["options"]
    assert options["lora"]["rank"] == 3


def test_a_merged_run_writes_the_whole_model_that_the_adapter_gives(packed: Path, base: Path, tmp_path: Path) -> None:
    go(packed, base, tmp_path / "adapter")
    go(packed, base, tmp_path / "merged", lora=replace(LORA, merge=True))
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    base_model = AutoModelForCausalLM.from_pretrained(base)
    with_adapter = peft.PeftModel.from_pretrained(base_model, str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(merged(TOKENS).logits, with_adapter(TOKENS).logits)


@pytest.mark.parametrize("experts", [False, True])
def test_a_frozen_base_in_16_bits_gives_the_bits_of_one_in_float32(
    packed: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experts: bool
) -> None:
    model = tiny_config(tmp_path / "moe.json", model_type="qwen3_moe", **EXPERTS) if experts else base
    run = open_run(packed, model, replace(OPTIONS, lora=LORA, dtype="bf16"))
    layers = run.loaded.causal.model.layers
    stored = {name: p.dtype for name, p in layers.named_parameters() if p.ndim > 1 and "lora" not in name}
    # A router of a mixture is outside of autocast in some models.
    assert {name.split(".")[-2] for name, dtype in stored.items() if dtype == torch.float32} <= {"gate"}
    assert sum(dtype == torch.bfloat16 for dtype in stored.values()) >= 8
    lowered = go(packed, model, tmp_path / "lowered", dtype="bf16")
    monkeypatch.setattr(ComputeSetting, "lower_products", lambda *_: None)
    whole = go(packed, model, tmp_path / "whole", dtype="bf16")
    assert [step.loss for step in lowered] == [step.loss for step in whole]
    mine, expected = weights_of(tmp_path / "lowered"), weights_of(tmp_path / "whole")
    assert all(torch.equal(mine[name], weight) for name, weight in expected.items())


@pytest.mark.usefixtures("any_width")
@pytest.mark.parametrize("quantize", [None, pytest.param("nf4", marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_same_bits_and_small_checkpoints(
    packed: Path, base: Path, tmp_path: Path, quantize: str | None
) -> None:
    options: dict[str, Any] = {"lora": replace(LORA, quantize=quantize), "checkpoint_every": 2}
    whole = go(packed, base, tmp_path / "whole", **options)
    parts = [step for until in (1, 1, None) for step in go(packed, base, tmp_path / "parts", until=until, **options)]
    assert [step.step for step in parts] == [step.step for step in whole] == list(range(1, len(whole) + 1))
    mine, expected = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("parts", "whole"))
    assert mine == expected
    records = [
        [
            {name: value for name, value in json.loads(line).items() if name not in TIMES}
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        for name in ("parts", "whole")
    ]
    assert records[0] == records[1]
    newest = sorted((tmp_path / "whole" / "checkpoints").iterdir())[-1]
    stored = [name for file in newest.glob("*.safetensors") for name in load_file(file)]
    names = [name for name in stored if name.startswith(("model.", "optimiser."))]
    assert names
    assert all("lora_" in name for name in names)


def test_a_run_is_not_resumed_with_another_adapter(packed: Path, base: Path, tmp_path: Path) -> None:
    go(packed, base, tmp_path / "out", until=1)
    assert "cannot resume: --lora-rank was 3 when the run started and is 4 now" in refusal(
        go, packed, base, tmp_path / "out", lora=LoraOptions(rank=4)
    )


def test_a_saved_adapter_trains_on_from_its_weights(packed: Path, base: Path, tmp_path: Path) -> None:
    first = go(packed, base, tmp_path / "first")
    second = go(packed, tmp_path / "first", tmp_path / "second", lora=None)
    assert second[0].loss < first[0].loss
    before, after = weights_of(tmp_path / "first"), weights_of(tmp_path / "second")
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    config = json.loads((tmp_path / "second" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        (lambda *_, **__: 1 / 0, r"PEFT cannot save its adapter \(division by zero\); install .* of peft$"),
        (lambda *_, **__: {"x": torch.zeros(1)}, r"it writes 1 of 28 weights; choose other lora_targets$"),
    ],
)
def test_an_adapter_that_peft_would_not_save_is_refused_before_the_first_step(
    packed: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any, complaint: str
) -> None:
    go(packed, base, tmp_path / "first")
    monkeypatch.setattr("peft.peft_model.get_peft_model_state_dict", fault)
    for model, lora in ((base, LORA), (base, replace(LORA, merge=True)), (tmp_path / "first", None)):
        with pytest.raises(TreepackError, match=complaint):
            open_run(packed, model, replace(OPTIONS, lora=lora))


@pytest.mark.usefixtures("any_width")
def test_only_the_adapter_has_state_in_the_optimiser_and_frozen_weights_count_as_work(packed: Path, base: Path) -> None:
    from treepack.train.optimiser import make_optimiser

    run = open_run(packed, base, replace(OPTIONS, lora=LORA))
    parameters = [parameter for group in make_optimiser(run).param_groups for parameter in group["params"]]
    assert {id(p) for p in parameters} == {id(p) for n, p in run.loaded.model.named_parameters() if "lora_" in n}
    plain = open_run(packed, base, OPTIONS)
    quantized = open_run(packed, base, replace(OPTIONS, lora=replace(LORA, quantize="nf4")))
    assert (run.costs() > plain.costs()).all()
    np.testing.assert_array_equal(quantized.costs(), run.costs())


def test_a_predictor_is_fitted_from_a_whole_model(packed: Path, base: Path, tmp_path: Path) -> None:
    go(packed, base, tmp_path / "out", steps=1)
    assert "is an adapter; fit a whole model" in refusal(
        start_values, tmp_path / "out", "fp32", "reference", torch.device("cpu"), 0
    )


def test_without_an_adapter_there_is_nothing_to_train_over_4_bits(packed: Path, base: Path) -> None:
    assert "contains no adapter to train; give lora_rank" in refusal(
        open_run, packed, base, replace(OPTIONS, lora=LoraOptions(quantize="nf4"))
    )


def test_commands_verify_train_and_score_an_adapter(treepack: Run, packed: Path, base: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(base), "--device", "cpu", "--attention", "reference"]
    verified = treepack("train", str(packed), *arguments, "--lora-rank", "2", "--verify")
    assert verified.status == 0, verified.err
    assert "lora_" in verified.out
    assert "float64" in verified.out
    options = ["--lora-rank", "2", "--lora-targets", "q_proj,up_proj", "--lora-alpha", "4", "--rows-per-step", "2"]
    trained = treepack("train", str(packed), *arguments, *options, "--out", str(tmp_path / "out"))
    assert trained.status == 0, trained.err
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], set(config["target_modules"])) == (2, 4, {"q_proj", "up_proj"})
    scored = treepack("logprobs", str(packed), "--model", str(tmp_path / "out"), "--out", str(tmp_path / "scored"))
    assert scored.status == 0, scored.err
    (part,) = (tmp_path / "scored").glob("*.parquet")
    assert any(any(cell or ()) for cell in pq.read_table(part)["term_old_logprob"].to_pylist())


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--lora-rank", "2", "--lora-dropout", "0.05"], "--lora-dropout is 0.05, but a token shared by branches"),
        (["--lora-rank", "2", "--quantize", "nf4", "--merge"], "--merge is not possible over a base of 4 bits"),
        (["--lora-alpha", "8"], "give --lora-rank too"),
    ],
)
def test_options_that_exclude_each_other_are_refused_before_anything_is_loaded(
    treepack: Run, packed: Path, tmp_path: Path, options: list[str], complaint: str
) -> None:
    done = treepack("train", str(packed), "--model", str(tmp_path / "none"), "--out", str(tmp_path / "out"), *options)
    assert done.status == 2
    assert complaint in " ".join(done.err.split())


@pytest.mark.slow
def test_two_ranks_train_the_adapter_of_one_process(packed: Path, base: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    go(packed, base, tmp_path / "saved", epochs=1)
    adapter: dict[str, Any] = {
        "r": 2,
        "target_modules": ["q_proj", "down_proj"],
        "task_type": "CAUSAL_LM",
        "init_lora_weights": False,
    }
    kinds: dict[str, dict[str, Any]] = {
        "dora": {"use_dora": True},
        "embedding": {"modules_to_save": ["embed_tokens"]},
    }
    for name, changes in kinds.items():
        model = peft.get_peft_model(tiny_model("qwen3", dtype=torch.float32), peft.LoraConfig(**adapter, **changes))
        model.peft_config["default"].base_model_name_or_path = str(base)
        model.save_pretrained(tmp_path / name, save_embedding_layers=False)
    # bitsandbytes needs widths that are multiples of 64 on some CPUs.
    wide: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "num_attention_heads": 2}
    config = json.loads(tiny_config(tmp_path / "wide.json", num_key_value_heads=2, **wide).read_text())
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(tmp_path / "wide")
    uneven = {"epochs": 2, "rows_per_step": 3}  # the second rank runs out of rows
    lora = {**uneven, "lora": LORA}
    cases = [
        Case("of DoRA", packed, tmp_path / "dora", uneven),
        Case("with an embedding", packed, tmp_path / "embedding", uneven),
        Case("random base", packed, tiny_config(tmp_path / "tiny.json"), lora),
        Case("experts", packed, tiny_config(tmp_path / "moe.json", model_type="qwen3_moe", **EXPERTS), lora),
        Case("4 bits", packed, tmp_path / "wide", {**uneven, "lora": replace(LORA, quantize="nf4")}),
        Case("saved", packed, tmp_path / "saved", uneven),
        Case("offloaded", packed, base, {**lora, "checkpoint_layers": "all", "offload_optimizer": True}),
        Case("compiled", packed, base, {**lora, "compile": True}),
        Case("grpo", packed, base, lora, "grpo"),
    ]
    results, expected = (train_over(size, tmp_path, cases) for size in (2, 0))
    for case in cases:
        mine, reference = (weights_of(Path(each[case.name]["out"])) for each in (results, expected))
        assert mine.keys() == reference.keys()
        for name, weight in reference.items():
            torch.testing.assert_close(mine[name], weight, rtol=1e-3, atol=2e-5)
        losses = [[record["loss"] for record in each[case.name]["records"]] for each in (results, expected)]
        assert losses[0] == pytest.approx(losses[1], rel=2e-5)
    graphs = [record["graphs"] for record in results["compiled"]["records"]]
    assert graphs[0] == expected["compiled"]["records"][0]["graphs"] > 0, "sharding compiles nothing more"
    assert set(graphs) == {graphs[0]}, "rows of other lengths compile nothing more"


@pytest.mark.slow
def test_two_ranks_resume_and_merge(packed: Path, base: Path, tmp_path: Path) -> None:
    merge = {"epochs": 2, "lora": replace(LORA, merge=True), "checkpoint_every": 1}
    cases = [
        Case("stopped", packed, base, merge, out=tmp_path / "parts", until=1),
        Case("resumed", packed, base, merge, out=tmp_path / "parts"),
        Case("whole", packed, base, merge, out=tmp_path / "whole"),
    ]
    train_over(2, tmp_path, cases)
    parts, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("parts", "whole"))
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
