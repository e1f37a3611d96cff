"""Saved models, read by vLLM in float32: the log-probabilities are those of the trained weights."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from support.model_table import ACCEPTED, READ_BY_VLLM
from support.oracle_model import VOCABULARY, packed_directory
from support.paths import ROOT, TESTS
from support.strategies import make
from support.tiny_families import save_family
from treepack.train.loop import train
from treepack.train.options import TrainOptions
from treepack.train.setup.opening import open_run

pytestmark = pytest.mark.vllm

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
OPTIONS = TrainOptions(device="cpu", lr=1e-2, rows_per_step=2, steps=1, checkpoint_every=0, attention="reference")
# With heads of 80, vLLM runs the same attention on every CPU, see `support.vllm_servers`.
SHAPE = {"hidden_size": 160, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 80}
FAMILIES = {family.kind: family for family in ACCEPTED if family.name in READ_BY_VLLM}
IDS = np.random.default_rng(1).integers(5, VOCABULARY - 1, 24).tolist()


def log_probabilities(model: Any) -> torch.Tensor:
    """The log-probability of each of IDS but the first, in float32."""
    with torch.no_grad():
        values = model(torch.tensor([IDS]), use_cache=False).logits[0, :-1].log_softmax(-1)
    found: torch.Tensor = values.gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    return found


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor], dict[str, Any]]:
    """Train each model for a step; return the copies, and the log-probabilities of the trainer and of vLLM."""
    folder = tmp_path_factory.mktemp("copies")
    generator = np.random.default_rng(0)
    rows = [make(f"t{i}", [1, 2, 3 + i % 2, *generator.integers(5, 49, 6).tolist()]) for i in range(4)]
    packed = packed_directory(folder / "packed", rows, capacity=32)
    runs = {name: (family, torch.float32, OPTIONS) for name, family in FAMILIES.items()}
    runs["rounded"] = (FAMILIES["qwen3"], torch.bfloat16, replace(OPTIONS, save_dtype="source"))
    values = {}
    for name, (family, dtype, options) in runs.items():
        save_family(family.kind, folder / "sources" / name, dtype=dtype, **SHAPE | family.options)
        run = open_run(packed, folder / "sources" / name, options)
        for _ in train(run, folder / name):
            pass
        model = run.loaded.model.eval()
        model.set_attn_implementation("eager")
        values[name] = log_probabilities(model)
    program = [str(PYTHON), str(TESTS / "support" / "vllm_reader.py"), str(folder)]
    asked = json.dumps({"names": list(runs), "ids": IDS})
    done = subprocess.run(program, input=asked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, values, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", FAMILIES)
def test_vllm_gives_the_log_probabilities_of_the_trainer(
    copies: tuple[Path, dict[str, torch.Tensor], dict[str, Any]], kind: str
) -> None:
    _, values, found = copies
    assert isinstance(found[kind], list), found[kind]
    assert np.ptp(found[kind]) > 1  # so that the comparison can fail
    assert (torch.tensor(found[kind]) - values[kind]).abs().max() < 1e-5


def test_a_copy_in_the_dtype_of_its_source_is_served_with_the_rounded_weights(
    copies: tuple[Path, dict[str, torch.Tensor], dict[str, Any]],
) -> None:
    folder, values, found = copies
    copy = folder / "rounded"
    fields = json.loads((copy / "config.json").read_bytes())
    assert fields.get("dtype", fields.get("torch_dtype")) == "bfloat16"
    assert {weight.dtype for weight in load_file(copy / "model.safetensors").values()} == {torch.bfloat16}
    rounded = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32, attn_implementation="eager").eval()
    assert (torch.tensor(found["rounded"]) - log_probabilities(rounded)).abs().max() < 1e-5
    assert (torch.tensor(found["rounded"]) - values["rounded"]).abs().max() > 1e-4  # of the weights in float32
