"""The saved model is its source, byte for byte, but for its weights and the fields that training changed."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.oracle_model import packed_directory, tiny_config, tiny_model
from support.paths import SAMPLE_DATA
from support.refusal import refusal
from support.strategies import make
from support.tiny_vision import read_weights, save_vision, tiny_vision
from treepack.errors import TreepackError
from treepack.model.adapters.lora_options import LoraOptions
from treepack.model.saved_files import check_files, with_end_tokens
from treepack.tokenise.tokenization import fingerprint, load_tokenizer
from treepack.train.loop import train
from treepack.train.options import TrainOptions
from treepack.train.run import TrainingRun
from treepack.train.setup.opening import open_run

OPTIONS = TrainOptions(device="cpu", lr=1e-2, rows_per_step=2, steps=1, checkpoint_every=0)
TOKENIZER = SAMPLE_DATA / "tokenizer"
END, WORD = 2, 40  # <|im_end|>, and a token that is no special one
OTHERS = {
    "README.md": b"---\nlicense: apache-2.0\n---\n",
    "LICENSE": b"Apache",
    "merges.txt": b"#version: 0.2\n",
    "special_tokens_map.json": b'{"eos_token":"<|im_end|>"}',
    "preprocessor_config.json": b'{"size": 16}\n',
    "modeling_own.py": b"# code\n",
    "additional_chat_templates/tools.jinja": b"{{ messages }}",
}
LEFT_OUT = (
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model.safetensors.index.json",
    "run.json",
    "notes.log",
)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return packed_of(tmp_path / "packed", END)


def packed_of(path: Path, end: int) -> Path:
    """Return packed rows of branching answers that end in the token `end`."""
    rollouts = [make(f"t{i}", [5, 6, 7 + i % 2, 20 + i, end], spans=[(2, 5, 1.0)]) for i in range(6)]
    return packed_directory(path, rollouts, capacity=32)


def source_at(path: Path, **fields: Any) -> Path:
    """Write a model as an older transformers did: rope_theta, a dtype, unknown fields, and files of all kinds."""
    tiny_model("qwen3", dtype=torch.bfloat16, vocab_size=1464).save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    del config["rope_parameters"], config["dtype"]
    config |= {"rope_theta": 1000000.0, "rope_scaling": None, "torch_dtype": "bfloat16", "eos_token_id": END}
    config |= {"rms_norm_eps": 1e-06, "of_another_program": {"a": [1, "\u00e9"]}, **fields}
    (path / "config.json").write_text(json.dumps(config, indent=4))
    shutil.copytree(TOKENIZER, path, dirs_exist_ok=True)
    (path / "generation_config.json").write_text('{ "eos_token_id":[2, 0], "temperature": 0.6}\n')
    for name, content in OTHERS.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content)
    for name in LEFT_OUT:
        (path / name).write_text("{}")
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files of a model except its weights, and except files of a run or a program."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    named = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    own = {*LEFT_OUT, "train.json", "metrics.jsonl"}
    return {name: content for name, content in named.items() if name not in own and not name.startswith("checkpoints")}


def go(packed: Path, model: Path | str, out: Path, **changes: Any) -> TrainingRun:
    run = open_run(packed, model, replace(OPTIONS, **changes))
    for _ in train(run, out):
        pass
    return run


LEFTOVERS: dict[str, Any] = {
    "output_attentions": True,
    "output_hidden_states": True,
    "output_router_logits": True,
    "use_cache": False,
    "return_dict": False,
    "torchscript": False,
    "_attn_implementation": "flash_attention_2",
    "gradient_checkpointing": True,
}


# transformers itself refuses output_attentions beside another attention than its own.
ATTENTION = "_attn_implementation"
ALL_AT_ONCE = {name: value for name, value in LEFTOVERS.items() if name != ATTENTION}


@pytest.mark.parametrize("fields", [{}, {ATTENTION: LEFTOVERS[ATTENTION]}, ALL_AT_ONCE])
def test_every_file_but_the_weights_is_the_source_s(packed: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    source = source_at(tmp_path / "source", **fields)
    run = go(packed, source, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(source)
    assert not any("generation" in note or "attention" in note for note in run.notes)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert not torch.equal(before["model.norm.weight"].float(), after["model.norm.weight"])


@pytest.mark.parametrize("changes", [{}, {"lora": LoraOptions(rank=2, merge=True)}])
def test_weights_are_saved_in_float32_or_rounded_to_the_dtype_of_each_in_the_source(
    packed: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    source = source_at(tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    for name in ("fp32", "source"):
        go(packed, source, tmp_path / name, save_dtype=name, checkpoint_every=1, **changes)
    whole, rounded = (load_file(tmp_path / name / "model.safetensors") for name in ("fp32", "source"))
    assert {tensor.dtype for tensor in whole.values()} == {torch.float32}
    assert {name: tensor.dtype for name, tensor in rounded.items()} == {n: t.dtype for n, t in tensors.items()}
    assert all(torch.equal(rounded[name], whole[name].to(rounded[name].dtype)) for name in whole)
    assert files_of(source) == files_of(tmp_path / "fp32")
    if not changes:  # more steps continue from the checkpoint, which has every bit
        for name in ("fp32", "source"):
            run = open_run(packed, source, replace(OPTIONS, steps=2, save_dtype=name, checkpoint_every=1))
            list(train(run, tmp_path / name, resume=True))
        whole, rounded = (load_file(tmp_path / name / "model.safetensors") for name in ("fp32", "source"))
        assert all(torch.equal(rounded[name], whole[name].to(rounded[name].dtype)) for name in whole)


def test_the_weights_of_a_vision_language_copy_are_rounded_too(packed: Path, tmp_path: Path) -> None:
    model = tiny_vision("gemma3", vocab_size=64).bfloat16()
    source = save_vision(model, tmp_path / "source", "hub")
    go(packed, source, tmp_path / "out", save_dtype="source")
    assert {tensor.dtype for tensor in read_weights(tmp_path / "out").values()} == {torch.bfloat16}


def test_an_adapter_is_not_rounded() -> None:
    with pytest.raises(TreepackError, match=r"^save_dtype source is for whole models.* omit it or merge$"):
        TrainOptions(save_dtype="source", lora=LoraOptions(rank=2))


@pytest.mark.parametrize("name", ["output_router_logits", "output_attentions"])
def test_settings_of_other_trainers_change_no_bit_of_a_mixture(packed: Path, tmp_path: Path, name: str) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    for folder, fields in (("plain", {}), ("set", {name: True})):
        config = tiny_config(tmp_path / f"{folder}.json", "qwen3", model_type="qwen3_moe", **experts, **fields)
        go(packed, config, tmp_path / folder)
        assert json.loads((tmp_path / folder / "config.json").read_text()).get(name) is (fields.get(name))
    plain, changed = (load_file(tmp_path / folder / "model.safetensors") for folder in ("plain", "set"))
    assert all(torch.equal(plain[key], changed[key]) for key in plain)


def test_a_model_in_the_cache_of_the_hub_is_copied_from_its_links(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model, revision = tmp_path / "models--owner--name", "c0ffee" + 34 * "0"
    blobs, snapshot = source_at(model / "blobs"), model / "snapshots" / revision
    for name in files_of(blobs) | {"model.safetensors": b""}:
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(os.path.relpath(blobs / name, (snapshot / name).parent))
        (blobs / name).chmod(0o444)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(revision)
    go(packed, "owner/name", tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(snapshot)
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    assert all(os.access(path, os.W_OK) for path in (tmp_path / "out").rglob("*"))


def test_a_config_file_is_the_configuration_of_its_random_model(packed: Path, tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "tiny.json", rope_theta=5e5, own_field=[1e-06], torch_dtype="float16")
    go(packed, config, tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved == {**json.loads(config.read_text()), "architectures": ["Qwen3ForCausalLM"]}
    assert (tmp_path / "out" / "config.json").read_text().startswith(config.read_text()[:-1])
    assert sorted(files_of(tmp_path / "out")) == ["config.json"]


def test_a_run_of_treepack_is_a_source_like_any_other(packed: Path, tmp_path: Path) -> None:
    source = source_at(tmp_path / "source")
    go(packed, source, tmp_path / "first", checkpoint_every=1)
    go(packed, tmp_path / "first", tmp_path / "second")
    assert files_of(tmp_path / "second") == files_of(source)


def test_a_model_without_a_tokenizer_gets_that_of_the_data(tmp_path: Path) -> None:
    made_by = fingerprint(load_tokenizer(str(TOKENIZER)))
    rows = [make(f"t{i}", [5, 20 + i, END], spans=[(1, 3, 1.0)]) for i in range(4)]
    packed = packed_directory(tmp_path / "packed", rows, capacity=32, tokenizer=made_by)
    config = tiny_config(tmp_path / "tiny.json", vocab_size=1464, eos_token_id=END)
    go(packed, config, tmp_path / "out")
    written = files_of(tmp_path / "out")
    assert {name: written[name] for name in files_of(TOKENIZER)} == files_of(TOKENIZER)
    assert written.keys() == {*files_of(TOKENIZER), "config.json"}


def test_an_adapter_has_the_tokenizer_of_its_base_and_keeps_its_own_files_when_it_trains_on(
    packed: Path, tmp_path: Path
) -> None:
    source = source_at(tmp_path / "source")
    go(packed, source, tmp_path / "first", lora=LoraOptions(rank=2))
    names = files_of(tmp_path / "first").keys()
    assert names - {"adapter_config.json"} < files_of(source).keys()
    assert {"tokenizer.json", "merges.txt", "chat_template.jinja", "adapter_config.json"} <= names
    config = json.loads((tmp_path / "first" / "adapter_config.json").read_text())
    text = json.dumps({**config, "lora_dropout": 0.1, "own_field": 3})
    (tmp_path / "first" / "adapter_config.json").write_text(text)
    (tmp_path / "first" / "README.md").write_text("mine")
    go(packed, tmp_path / "first", tmp_path / "second", lora=LoraOptions())
    assert files_of(tmp_path / "second") == files_of(tmp_path / "first")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ('{"eos_token_id": 0, "top_p": 0.9}', '{"eos_token_id": [0, 2], "top_p": 0.9}'),
        ('{"eos_token_id": [0, 1]}', '{"eos_token_id": [0, 1, 2]}'),
        ('{"top_k": 20}', '{"top_k": 20,"eos_token_id": [0, 2]}'),
        (None, '{\n  "pad_token_id": 1,\n  "eos_token_id": [0, 2]\n}\n'),
    ],
)
def test_the_end_token_of_the_trained_answers_is_added_with_a_note(
    packed: Path, tmp_path: Path, settings: str | None, expected: str
) -> None:
    source = source_at(tmp_path / "source", eos_token_id=0, pad_token_id=1, bos_token_id=None)
    (source / "generation_config.json").unlink()
    if settings is not None:
        (source / "generation_config.json").write_text(settings)
    run = go(packed, source, tmp_path / "out")
    assert (tmp_path / "out" / "generation_config.json").read_text() == expected
    assert any(
        "answers end in '<|im_end|>', at which generation with the model does not stop" in note for note in run.notes
    )
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    model, prompt = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), torch.tensor([[5, 6]])
    with torch.no_grad():  # a model that says the end token alone
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))
        model.lm_head.weight[END] = 10 * model.model(prompt).last_hidden_state[0, -1]
    assert model.generate(prompt, max_new_tokens=5, do_sample=False).tolist() == [[5, 6, END]]


def test_answers_that_were_cut_add_no_end_token(tmp_path: Path) -> None:
    source = source_at(tmp_path / "source", eos_token_id=0)
    (source / "generation_config.json").write_text('{"eos_token_id": 0}')
    go(packed_of(tmp_path / "packed", WORD), source, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(source)


def test_an_adapter_whose_base_lacks_the_end_token_says_so(packed: Path, tmp_path: Path) -> None:
    source = source_at(tmp_path / "source")
    (source / "generation_config.json").write_text('{"eos_token_id": 0}')
    run = go(packed, source, tmp_path / "out", lora=LoraOptions(rank=2))
    assert any("give it to the engine as a stop token" in note for note in run.notes)
    assert "generation_config.json" not in files_of(tmp_path / "out")


def test_files_that_cannot_be_read_again_are_refused_before_training(tmp_path: Path) -> None:
    assert "its saved copy could not be read" in refusal(
        check_files, {"config.json": b'{"model_type": "qwen3", "layer_types": 3}'}, "m"
    )


def test_the_copy_computes_what_the_trainer_s_model_computes(packed: Path, tmp_path: Path) -> None:
    source = source_at(tmp_path / "source")
    run = go(packed, source, tmp_path / "out")
    tokens = torch.tensor([[5, 6, 7, 8]])
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    run.loaded.model.eval().set_attn_implementation("eager")
    with torch.no_grad():
        ours, theirs = (model(input_ids=tokens, use_cache=False).logits for model in (run.loaded.model, again))
    assert torch.equal(ours, theirs)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").convert_tokens_to_ids("<|im_end|>") == END


def test_no_new_end_token_writes_no_file() -> None:
    assert with_end_tokens({"config.json": b'{"eos_token_id": [2]}'}, [2]) == (
        {"config.json": b'{"eos_token_id": [2]}'},
        (),
    )
