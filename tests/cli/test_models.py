"""`treepack models`: verdict, kernels and costs of a model, from the table that the tests of families prove."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.command_line import Run
from support.model_table import ACCEPTED, REFUSED
from treepack.analysis.forecast import read_device
from treepack.costs.model_cost import FlopCount, operations, read_shape
from treepack.costs.presets import PRESETS


def test_the_list_has_every_family_with_its_verdict(treepack: Run) -> None:
    lines = treepack("models").out.splitlines()
    assert len(lines) == len(ACCEPTED) + len(REFUSED)
    for family in (*ACCEPTED, *REFUSED):
        (line,) = [each for each in lines if each.startswith(f"{family.name}  ")]
        assert family.kind in line
        assert ("exact, " in line) == (not family.refusal)
        assert family.refusal in line


def test_a_preset_is_described_with_the_operations_and_memory_of_a_row(treepack: Run) -> None:
    report = treepack("models", "Qwen/Qwen3-8B-Base", "--tokens", "16k", "--device", "h200", "--json").json
    assert (report["exact"], report["families"], report["kernels"]) == (True, ["Qwen 3"], "Hopper")
    flops = operations(read_shape("qwen3-8b"), FlopCount(16384, 16384 * 16385 // 2, 16384))
    assert report["flops"] == flops
    assert report["seconds"] == pytest.approx(flops / read_device("h200").rate / 0.5)
    shown = treepack("models", "qwen3-8b", "--device", "rtx4090", "--tokens", "8k").out
    assert shown.startswith("qwen3-8b trains exactly.\n")
    assert shown.endswith("qwen3-8b with AdamW in fp32 does not fit one rtx4090; use 16 GPUs.\n")


def test_a_row_that_fits_no_number_of_gpus_is_named(treepack: Run) -> None:
    shown = treepack("models", "qwen3-8b", "--device", "rtx4090").out
    assert shown.endswith(
        "any number of rtx4090: rows of 65,536 tokens with train --carry 4096 need 25.4 GiB of 23 on each.\n"
    )


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_of_a_family(treepack: Run, name: str) -> None:
    report = treepack("models", name, "--json").json
    assert report["exact"] is True
    assert report["flops"] > 0  # type: ignore[operator]


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("Gemma 3", "Gemma 3 trains exactly."),
        ("mamba", "mamba is refused: its layers compute a selective scan, which has no form on trees here."),
        ("config.json", "config.json: no test of treepack has models of type new; treepack train PACKED --model MODEL"),
    ],
)
def test_a_model_has_a_verdict(
    treepack: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(PRESETS["qwen3-8b"] | {"model_type": "new"}))
    assert treepack("models", model).out.startswith(sentence)


def test_a_name_of_no_model_is_refused_with_the_nearest_one(treepack: Run) -> None:
    result = treepack("models", "gema3_text")
    assert result.err == "treepack: gema3_text: is not a family, preset or config.json; did you mean 'gemma3_text'?\n"
    result = treepack("models", "qwen3-8b", "--device", "gtx")
    assert result.err.startswith(
        "treepack: --device is 'gtx'; expected a100, h100, h200, b200, l40s, rtx4090, rtx5090 or"
    )
