"""The warm-up of the small policies, and the files that it writes."""

import json
import sys
from pathlib import Path

import numpy as np
import probe
import pytest
import torch
import warm_up
from decode import DecodeEngine, Request
from policy import load_policy, make_policy, save_policy
from tasks import make_task
from words import STOP, encode

import treepack
from treepack.errors import TreepackError
from treepack.rollout.engine import Sampling


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["warm_up.py", *map(str, words)])
    warm_up.main()


def test_a_warm_up_learns_the_traces_and_writes_what_is_needed_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "policy"
    sizes = "--shape test --device cpu --batch 8 --max-steps 60 --every 60 --prompts 4 --levels 2 --rate 1e-2".split()
    run(monkeypatch, "--task", "steps", "--out", out, *sizes, "--set", "modulus=5", "error=0.25", "largest=3")
    printed = capsys.readouterr().out
    record = json.loads((out / "warm_up.json").read_text())
    task = warm_up.load_task(out)
    assert (record["steps"], task.dial.error, task.dial.modulus, task.levels) == (60, 0.25, 5, (2,))
    assert f"| 2 | {record['pass_rates']['2']:.3f} |" in printed
    ids, mask = next(warm_up.batches(task, 16, seed=99))
    with torch.no_grad():
        losses = [
            float(warm_up.trace_loss(model, ids, mask)) for model in (make_policy("test", seed=0), load_policy(out))
        ]
    # At first all 131 words are about equally likely, ln 131 = 4.9; the responses have 13 different ones, ln 13 = 2.6.
    assert losses[0] > 4.5
    assert losses[1] < 2.6


def test_traces_are_the_same_for_any_number_of_workers() -> None:
    task = make_task("steps", levels=[2], modulus=5)
    alone, together = (warm_up.batches(task, 2, 3, workers) for workers in (0, 1))
    for _ in range(warm_up.SAMPLES_AT_ONCE + 1):
        for one, other in zip(next(alone), next(together), strict=True):
            assert torch.equal(one, other)
    together.close()


def test_a_warm_up_ends_after_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = "--shape test --device cpu --batch 4 --prompts 2 --levels 2 --minutes 0 --every 1000".split()
    run(monkeypatch, "--task", "steps", "--out", tmp_path / "policy", *sizes)
    record = json.loads((tmp_path / "policy" / "warm_up.json").read_text())
    assert record["steps"] == 1
    assert record["pass_rates"].keys() == {"2"}


def test_padding_changes_no_loss() -> None:
    model = make_policy("test", seed=1)
    samples = make_task("steps").examples(3, seed=1, levels=[2, 5, 9])
    alone = [warm_up.padded([sample]) for sample in samples]
    with torch.no_grad():
        sums = [float(warm_up.trace_loss(model, *each)) * int(each[1].sum()) for each in alone]
        together = float(warm_up.trace_loss(model, *warm_up.padded(samples)))
    assert together == pytest.approx(sum(sums) / sum(int(each[1].sum()) for each in alone), rel=1e-5)


def test_a_saved_policy_is_loaded_as_it_was_by_the_decoder_and_by_treepack(tmp_path: Path) -> None:
    model = make_policy("test", seed=2)
    save_policy(model, tmp_path / "policy")
    request = Request(encode("<steps> 3 a: + 4 ?"), 3, 8, 5)
    sampling = Sampling(stop_token_ids=(STOP,))
    loaded = treepack.load_model(tmp_path / "policy", attention="reference")
    models = (model, load_policy(tmp_path / "policy"), loaded.causal)
    answers = [DecodeEngine(each, sampling, rows=4, longest=16).decode([request])[0] for each in models]
    for answer in answers[1:]:
        for segment, expected in zip(answer, answers[0], strict=True):
            assert segment.tokens.tolist() == expected.tokens.tolist()
    with pytest.raises(TreepackError, match="is not empty; give a new folder"):
        save_policy(model, tmp_path / "policy")


def test_policies_are_a_function_of_the_seed_and_leave_the_random_state_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, again, other = (make_policy("test", seed=seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    with pytest.raises(TreepackError, match="shape is 'huge'; expected one of small"):
        make_policy("huge", seed=0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "{}"], "exists; give a new folder"),
        (["--out", "{}/new", "--set", "error=much"], "--set error=much: expected a name and a number"),
        (["--out", "{}/new", "--set", "errors=1"], "the dial of steps has no errors"),
    ],
)
def test_bad_options_of_a_warm_up_are_one_sentence(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, "--task", "steps", *(word.format(tmp_path) for word in words))


def test_the_probe_runs_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["probe.py", "--dry-run", "--device", "cpu"])
    probe.main()
    printed = capsys.readouterr().out
    error = float(printed.split("log-probability: ")[1].split()[0])
    assert 0 < error < 1e-5
    assert [line.split(" | ")[0] for line in printed.splitlines() if line.startswith("| ")][1:] == ["| 8", "| 32"]
    assert np.isfinite(error)
