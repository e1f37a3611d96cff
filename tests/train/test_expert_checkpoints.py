"""Checkpoints whose tensors transformers renames or merges: read in parts and written as the hub names them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from support.expert_ranks import reload_over
from support.loading_memory import make_checkpoint, num_bytes, peaks
from support.refusal import refusal
from support.tiny_families import family_config, transformers_types
from treepack.model.load import build_empty, build_model, load_model, read_config
from treepack.model.saved_files import copied_files, with_model, write_files
from treepack.model.weights.files import weight_files
from treepack.model.weights.reading import find_plan, read_part
from treepack.model.weights.traced import TracedTensor
from treepack.model.weights.writing import saved_weights

# One tensor per expert; all experts in one tensor; the same with other names; dense; dense without a prefix.
MERGED = "qwen3_moe qwen2_moe mixtral glm4_moe deepseek_v3 minimax_m2".split()
KINDS = [*MERGED, "gpt_oss", "granitemoe", "qwen3", "gpt2"]


def make(folder: Path, kind: str) -> Path:
    """Write a tiny checkpoint in bfloat16 with the names that it has on the hub, in several files."""
    torch.manual_seed(0)
    fields = {"first_k_dense_replace": 1} if kind == "deepseek_v3" else {}  # of two layers
    model = AutoModelForCausalLM.from_config(family_config(kind, **fields), dtype=torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder / kind, max_shard_size="20KB")
    if kind == "gpt2":  # on the hub its names lack the prefix of the class
        for path in (folder / kind).glob("*.safetensors"):
            tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
            save_file(tensors, path, metadata={"format": "pt"})
        index = folder / kind / "model.safetensors.index.json"
        index.write_text(index.read_text().replace('"transformer.', '"'))
    assert len(list((folder / kind).glob("*.safetensors"))) > 1
    return folder / kind


def contents(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def plan_of(source: Path) -> tuple[Any, dict[str, TracedTensor], dict[str, Path]]:
    config, _ = read_config(source)
    files = weight_files(source)
    assert files is not None
    model = build_empty(source, config, torch.float32)
    plan = find_plan(model, files, str(source))
    assert plan is not None
    return model, plan, files


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_three_ranks_are_the_tensors_that_transformers_loads(kind: str, tmp_path: Path) -> None:
    source = make(tmp_path, kind)
    _, plan, files = plan_of(source)
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict()
    assert (kind in MERGED) == any(len(traced.boxes or ()) > 1 for traced in plan.values())
    for name, traced in plan.items():
        length = -(-len(traced) // 3)
        parts = []
        for first in range(0, len(traced), length):
            rows = (first, min(first + length, len(traced)))
            part = torch.full((rows[1] - rows[0], *traced.shape[1:]), torch.nan)
            read_part(traced, (rows, *((0, size) for size in traced.shape[1:])), files, part)
            parts.append(part)
        assert torch.equal(torch.cat(parts), expected[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_read_in_parts_and_written_has_the_files_that_transformers_writes(kind: str, tmp_path: Path) -> None:
    source = make(tmp_path, kind)
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = build_model(source, read_config(source)[0], torch.float32, 0)
    out = tmp_path / "ours"
    weights = saved_weights(ours)
    assert weights is not None
    write_files(with_model(copied_files(source), ours), out)
    weights.write(out, max_file_bytes=30_000)
    expected, written = contents(tmp_path / "theirs"), contents(out)
    assert written.keys() == expected.keys()
    assert kind == "gpt2" or written.keys() == contents(source).keys()
    for name, tensor in expected.items():
        assert (written[name].dtype, written[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(written[name], tensor), name
    again, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values())
    assert all(
        torch.equal(a, b) for a, b in zip(again.state_dict().values(), theirs.state_dict().values(), strict=True)
    )


def test_files_are_split_as_their_index_says_and_hold_no_more_than_asked(tmp_path: Path) -> None:
    weights = saved_weights(load_model(make(tmp_path, "qwen3_moe")).model)
    assert weights is not None
    weights.write(tmp_path, max_file_bytes=30_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    paths = sorted(tmp_path.glob("*.safetensors"))
    assert {path.name: set(load_file(path)) for path in paths} == {
        file: {name for name, each in index["weight_map"].items() if each == file}
        for file in set(index["weight_map"].values())
    }
    sizes = [sum(tensor.nbytes for tensor in load_file(path).values()) for path in paths]
    assert len(sizes) > 1
    assert max(sizes) <= 30_000
    assert index["metadata"]["total_size"] == sum(sizes)


@pytest.mark.skipif("inkling2_text" not in transformers_types(), reason="this transformers has no such type")
def test_a_conversion_that_interleaves_rows_has_no_plan(tmp_path: Path) -> None:
    config = family_config("inkling2_text")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    files = weight_files(tmp_path)
    assert files is not None
    assert find_plan(build_empty(tmp_path, config, torch.float32), files, str(tmp_path)) is None


def test_a_weight_of_another_shape_is_refused_before_any_is_read(tmp_path: Path) -> None:
    source = make(tmp_path, "qwen3_moe")
    path = next(path for path in source.glob("*.safetensors") if "model.norm.weight" in load_file(path))
    save_file(load_file(path) | {"model.norm.weight": torch.ones(7)}, path, metadata={"format": "pt"})
    assert "model.norm.weight is mismatched in its weights (of shape [7], and [32]" in refusal(load_model, source)


def test_a_missing_expert_is_refused(tmp_path: Path) -> None:
    source = make(tmp_path, "qwen3_moe")
    tensors = contents(source)
    for path in source.glob("model*"):
        path.unlink()
    del tensors["model.layers.1.mlp.experts.2.down_proj.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.mlp.experts.down_proj" in refusal(load_model, source)


@pytest.mark.slow
def test_three_ranks_load_and_write_four_experts(tmp_path: Path) -> None:
    # 4 experts on 3 ranks: 2, 2, none
    sources = [make(tmp_path, kind) for kind in ("qwen3_moe", "gpt2")]
    eight_bits = make(tmp_path / "other", "qwen3")
    path = next(iter(sorted(eight_bits.glob("*.safetensors"))))
    save_file({n: t.to(torch.float8_e4m3fn) for n, t in load_file(path).items()}, path, metadata={"format": "pt"})
    results = reload_over(3, tmp_path, [*sources, eight_bits])
    for source in (*sources, eight_bits):
        result = results[source.name]
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        expected = model.state_dict()
        assert result.tensors.keys() == expected.keys()
        assert all(torch.equal(result.tensors[name], tensor) for name, tensor in expected.items())
        assert any("every rank read the whole model" in note for note in result.notes) is (source is eight_bits)
        model.save_pretrained(tmp_path / f"{source.name}-theirs")
        theirs, written = contents(tmp_path / f"{source.name}-theirs"), contents(result.out)
        assert written.keys() == theirs.keys()
        assert all(torch.equal(written[name], tensor) for name, tensor in theirs.items())
        assert result.refused, "a first attempt wrote into a directory that does not exist"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_needs_its_share_of_the_model_and_one_layer_to_read_it(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "checkpoint", layers=16, experts=16, width=512)
    whole, layer = num_bytes(source)
    assert layer * 10 < whole
    for reading, loading, saving in peaks(source, size=2):
        assert reading < whole / 2 + layer
        # The probe gathers a layer and the next one, each once in parts and once whole, and computes.
        assert loading < whole / 2 + 5 * layer
        assert saving < 3 * layer
    ((reading, loading, saving),) = peaks(source, size=1)
    assert reading <= loading < whole + layer
    assert saving < layer
