"""The loop of commands on docs/tree-rl.md runs as it stands, and a step samples from the model of the step before."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support.command_line import Run
from support.paths import ROOT
from treepack import load_model, make_batch
from treepack.model.forward import row_logprobs
from treepack.pack.files import read_rows

SERVER = "http://localhost:8000"


def blocks(language: str) -> list[str]:
    section = (ROOT / "docs" / "tree-rl.md").read_text().partition("\n### With commands and a server\n")[2]
    return re.findall(rf"^```{language}\n(.*?)^```$", section.partition("\n## ")[0], re.MULTILINE | re.DOTALL)


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def sampler_gap(packed: str, model: str) -> float:
    """Return the largest difference between recorded log-probabilities of rows and those of `model`."""
    loaded, gap = load_model(model), 0.0
    for row in read_rows(packed):
        batch = make_batch(row)
        assert batch.terms is not None
        assert batch.terms.sampling_logprob is not None
        with torch.no_grad():
            logprobs, _ = row_logprobs(loaded, batch, batch.terms.tokens, temperature=0.7)
        gap = max(gap, float((logprobs[batch.terms.index] - batch.terms.sampling_logprob).abs().max()))
    return gap


@pytest.mark.slow
def test_two_steps_of_commands_run_as_they_stand(
    treepack: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sample_data").symlink_to(ROOT / "sample_data")
    monkeypatch.chdir(tmp_path)
    (program,), (first,) = blocks("python"), blocks("sh")
    subprocess.run([sys.executable, "-c", program], check=True)
    model = "sample_data/tiny-qwen3.json"
    # The next step, as the page describes it.
    second = first.replace("step-1", "step-2").replace("--step 1 --seed 1", "--step 2 --seed 2")
    second = second.replace(model, "step-1/policy")
    for served, text in ((model, first), ("step-1/policy", second)):
        commands = text.replace("\\\n", "").splitlines()
        assert [line.split()[1] for line in commands] == ["rollout", "build-trie", "advantages", "pack", "train"]
        for line in commands:
            # A model in this process in place of a server of the same model.
            name, *arguments = shlex.split(line.replace(SERVER, served))
            done = treepack(*arguments, *(["--device", "cpu"] if arguments[0] in ("rollout", "train") else []))
            assert (name, done.status) == ("treepack", 0), f"{line}: {done.err}"
            # The warning about a sampler that is not the policy.
            assert "the sampler's recorded log-probabilities differ" not in done.err
    for step in (1, 2):
        assert {record["step"] for record in lines(f"step-{step}/rollouts.jsonl")} == {step}
    # The second step was sampled from the first one's model, and not from the model that the first one started with.
    assert sampler_gap("step-2/packed", "step-1/policy") < 1e-5
    assert sampler_gap("step-2/packed", model) > 1e-3
    (figures,) = lines("step-2/policy/metrics.jsonl")
    assert figures["importance"] == pytest.approx(1, abs=1e-6)
    assert Path("step-1/policy/model.safetensors").read_bytes() != Path("step-2/policy/model.safetensors").read_bytes()
