"""The reproduction: a dry run writes every kind of table, and the decoder samples from the model's own distribution."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import distil
import numpy as np
import pytest
import reproduce
import sums
import torch
from credit import ESTIMATORS
from decode import DecodeEngine, Request
from policies import make_policy
from transformers import AutoTokenizer

from support.paths import SAMPLE_DATA
from treepack.rollout.options import Sampling


def cells(table: Path) -> dict[str, list[str]]:
    lines = re.findall(r"^\| (.+) \|$", table.read_text(), re.MULTILINE)
    return {first: rest for first, *rest in (line.split(" | ") for line in lines)}


@pytest.mark.parametrize(
    "only",
    [
        ["credit-steps"],
        pytest.param(["curves-steps"], marks=pytest.mark.slow),  # three runs
    ],
    ids=["credit", "runs"],
)
def test_a_dry_run_writes_the_tables_of_all_arms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only: list[str]
) -> None:
    words = ["--out", str(tmp_path), "--dry-run", "--device", "cpu", "--minutes", "20"]
    monkeypatch.setattr(sys, "argv", ["reproduce.py", *words, "--only", *only])
    reproduce.main()
    for name in only:
        kind = name.partition("-")[0]
        expected = set(ESTIMATORS) if kind == "credit" else set(reproduce.TABLES[kind].arms.values())
        lines = cells(tmp_path / f"{name}.md")
        assert lines.keys() - {"estimator", "arm"} == expected, name
        heading = lines.pop("estimator" if kind == "credit" else "arm")
        assert {len(line) for line in lines.values()} == {len(heading)}
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.jsonl")}
    reproduce.main()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.jsonl")} == written  # nothing was missing


def test_the_decoder_gives_the_log_probabilities_of_the_model_and_stops() -> None:
    model = make_policy("test", seed=1).double()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 131, size).astype(np.int32) for size in (3, 9, 9, 4)]
    requests = [Request(ids, 3, 6, seed) for seed, ids in enumerate(prompts)]
    stop = tuple(range(20))
    answers = DecodeEngine(model, Sampling(stop_token_ids=stop), rows=7).decode(requests)
    assert {segment.finish for segments in answers for segment in segments} == {"stop", "length"}
    for ids, segments in zip(prompts, answers, strict=True):
        assert len(segments) == 3
        for segment in segments:
            assert [token in stop for token in segment.tokens[:-1].tolist()] == [False] * (len(segment.tokens) - 1)
            assert (segment.finish == "stop") == (segment.tokens[-1] in stop)
            whole = torch.from_numpy(np.concatenate([ids, segment.tokens]).astype(np.int64))
            with torch.no_grad():
                logprobs = model(input_ids=whole[None]).logits[0, :-1].log_softmax(-1)
            expected = logprobs.gather(1, whole[1:, None]).squeeze(1)[-len(segment.tokens) :]
            assert segment.logprobs is not None  # in float32
            np.testing.assert_allclose(segment.logprobs, expected.numpy(), rtol=1e-5)


def test_a_continuation_does_not_depend_on_its_batch() -> None:
    engine = DecodeEngine(make_policy("test", seed=1).double(), Sampling(), rows=16)
    requests = [Request(np.arange(2, 4 + seed, dtype=np.int32), 2, 5, seed) for seed in range(5)]
    together = engine.decode(requests)
    for request, segments in zip(requests, together, strict=True):
        (alone,) = engine.decode([request])
        assert [each.tokens.tolist() for each in alone] == [each.tokens.tolist() for each in segments]


def test_solutions_of_sums_are_right_and_alone_are_trained() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SAMPLE_DATA / "tokenizer")
    more = {"seed": 0, "dial": sums.Dial(), "levels": (3,), "tokenizer": tokenizer}
    for ids, mask in sums.examples(5, **more):
        question = tokenizer.decode(ids[mask == 0].tolist())
        solution = tokenizer.decode(ids[mask == 1].tolist())
        addends = [int(number) for number in re.findall(r"\d+", question.partition("What is")[2].partition("?")[0])]
        assert len(addends) == 3
        assert sums.reward(solution, sum(addends)) == 1
        assert sums.reward(solution, sum(addends) + 1) == 0


@pytest.mark.slow
def test_a_dry_run_of_distillation_writes_a_line_for_each_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--out", str(tmp_path), "--dry-run", "--steps", "1", "--prompts", "2", "--held-out", "2"]
    monkeypatch.setattr(sys, "argv", ["distil.py", *words])
    distil.main()
    lines = cells(tmp_path / "distil.md")
    assert lines.keys() - {"loss"} == distil.LOSSES.keys()
