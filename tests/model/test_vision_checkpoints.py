"""Vision-language checkpoints: the text half is loaded and trained, and the whole checkpoint is saved."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from support.oracle_model import packed_directory
from support.strategies import make
from support.tiny_vision import HUB_NAMES, read_weights, save_vision, tiny_vision, vision_config
from treepack import TreepackError
from treepack.model.adapter import LoraOptions
from treepack.model.load import build_model, load_model, read_config
from treepack.model.verify import verify_gradients
from treepack.model.whole_checkpoint import save_whole
from treepack.train.directory import FINISHED
from treepack.train.loop import train
from treepack.train.options import TrainOptions
from treepack.train.run import open_run, open_verification

KINDS = "qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe glm4v glm4v_moe gemma3 mistral3 internvl".split()
NAMES = [(kind, "saved") for kind in KINDS] + [(kind, "hub") for kind in HUB_NAMES] + [("qwen3_vl_moe", "turned")]
OPTIONS = TrainOptions(device="cpu", lr=1e-2, rows_per_step=2, steps=1, attention="reference")
TOKENS = torch.tensor([[1, 2, 3, 4, 5]])


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = np.random.default_rng(0)
    rollouts = [make(f"t{i}", [1, 2, 3 + i % 2, *generator.integers(5, 49, 6).tolist()]) for i in range(6)]
    return packed_directory(tmp_path_factory.mktemp("data") / "packed", rollouts, capacity=32)


def run(packed: Path, model: Path, out: Path, **changes: Any) -> None:
    for _ in train(open_run(packed, model, replace(OPTIONS, **changes)), out):
        pass


def logits(model: Any) -> torch.Tensor:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return found


@pytest.mark.parametrize(("kind", "names"), NAMES)
def test_a_step_changes_only_the_text_half_of_the_checkpoint(
    packed: Path, tmp_path: Path, kind: str, names: str
) -> None:
    source = save_vision(tiny_vision(kind), tmp_path / "source", names)
    run(packed, source, tmp_path / "out")
    before, after = read_weights(source), read_weights(tmp_path / "out")
    assert {name: after[name].shape for name in after} == {name: before[name].shape for name in before}
    equal = {name for name in before if torch.equal(before[name], after[name])}
    vision = {name for name, tensor in before.items() if tensor.dtype == torch.bfloat16}
    buffers = {name for name in before if "e_score_correction_bias" in name}
    assert equal == vision | buffers
    assert all(after[name].dtype == torch.bfloat16 for name in vision)
    for file in ("config.json", "preprocessor_config.json"):
        assert (source / file).read_bytes() == (tmp_path / "out" / file).read_bytes()
    whole, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    text = load_model(tmp_path / "out", attention="reference").model
    assert torch.equal(logits(whole), logits(text))
