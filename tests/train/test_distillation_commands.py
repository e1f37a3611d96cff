"""Distillation by commands: a teacher writes its words into rows, or scores them while the student trains."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.command_line import Run as Command
from support.oracle_distillation import laws_of
from support.oracle_model import VOCABULARY, tiny_config, write_rows
from support.packed_objectives import as_trajectories, packed_model, plain, rollouts
from treepack.pack.files import read_rows
from treepack.train.logprobs import open_scoring, scored_provenance, term_scores
from treepack.train.scoring_options import ScoreOptions

WITHOUT = ["old_logprobs", "ref_logprobs", "sampling_logprobs"]


def rows_in(path: Path) -> Path:
    return write_rows(path, as_trajectories(rollouts(), without=WITHOUT), [i % 3 for i in range(10)])


def students(tmp_path: Path) -> tuple[Path, Path]:
    """Config files of a student and of a wider teacher of the same vocabulary."""
    return tiny_config(tmp_path / "student.json"), tiny_config(tmp_path / "teacher.json", hidden_size=24)


def metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("limit", [None, 4])
def test_the_likeliest_words_of_a_term_are_those_of_its_trajectory_alone(tmp_path: Path, limit: int | None) -> None:
    recorded = rollouts()
    rows = list(read_rows(rows_in(tmp_path / "packed")))
    options = ScoreOptions(column="teacher", top_k=4, carry=limit, loss_chunk=3)
    for row, scores in zip(rows, term_scores(packed_model("qwen3"), rows, options), strict=True):
        assert row.terms is not None
        assert scores.words is not None
        assert scores.word_logprobs is not None
        for i, name in enumerate(row.trajectory_ids):
            with torch.no_grad():
                laws = list(laws_of(plain("qwen3"), recorded[int(name[1:])]).values())
            best = [law.log().topk(4) for law in laws]
            mine = row.terms.trajectory == i
            assert scores.words[mine].tolist() == [each.indices.tolist() for each in best]
            np.testing.assert_allclose(scores.word_logprobs[mine], [each.values.numpy() for each in best], rtol=1e-9)


@pytest.mark.slow
def test_stored_words_train_as_a_teacher_online_does(treepack: Command, tmp_path: Path) -> None:
    student, teacher = students(tmp_path)
    packed = rows_in(tmp_path / "packed")
    common = ("--device", "cpu", "--quiet")
    done = treepack(
        *("logprobs", packed, "--model", teacher, "--column", "teacher", "--top-k", 50, "--out", tmp_path / "taught"),
        *common,
    )
    assert (done.status, done.notes) == (0, "")
    assert "term_teacher_topk_logprobs" in done.out
    lines = {}
    for name, data, extra in (("stored", tmp_path / "taught", ()), ("online", packed, ("--teacher", teacher))):
        options = ("--loss", "distill", "--teacher-kl", "0.5", "--distill-beta", "0.5", "--steps", "2", *extra)
        done = treepack("train", data, "--model", student, *options, "--out", tmp_path / name, *common)
        assert done.status == 0, done.err
        lines[name] = metrics(tmp_path / name)
    for stored, online in zip(lines["stored"], lines["online"], strict=True):
        assert stored["divergence"] > 1e-3
        for name in ("loss", "divergence", "teacher_kl", "grad_norm"):
            assert stored[name] == pytest.approx(online[name], rel=1e-4)
    again = treepack(
        *("train", packed, "--model", student, "--teacher", teacher, "--loss", "distill", "--verify", "--carry", 4),
        *("--lora-rank", 2, *common),
    )
    assert again.status == 0, again.err


def test_each_teacher_writes_the_groups_that_it_teaches(treepack: Command, tmp_path: Path) -> None:
    student, teacher = students(tmp_path)
    packed, common = rows_in(tmp_path / "packed"), ("--device", "cpu", "--column", "teacher", "--quiet")
    for source, model, group, top in ((packed, teacher, "a", 3), (tmp_path / "a", student, "b", 5)):
        options = ("--groups", group, "--top-k", top, "--out", tmp_path / group)
        assert treepack("logprobs", source, "--model", model, *options, *common).status == 0
        if group == "a":
            done = treepack("train", tmp_path / "a", "--model", student, "--loss", "opd", "--dry-run")
            assert done.status == 1
            assert "no term_teacher_logprob for some trajectories" in done.err
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    assert manifest["logprobs"]["teacher"]["others"]["groups"] == "a"
    for row in read_rows(tmp_path / "b"):
        assert row.terms is not None
        assert row.terms.teacher_topk_ids is not None
        assert row.terms.teacher_logprob is not None
        assert np.isfinite(row.terms.teacher_logprob).all()
        groups = np.array(row.trajectory_groups)[row.terms.trajectory]
        assert row.terms.teacher_topk_ids.sizes.tolist() == np.where(groups == "a", 3, 5).tolist()


def test_more_words_than_the_vocabulary_are_all_of_them_with_a_note(tmp_path: Path) -> None:
    _, teacher = students(tmp_path)
    options = ScoreOptions(column="teacher", top_k=1000, device="cpu")
    scoring = open_scoring(rows_in(tmp_path / "packed"), teacher, options)
    assert scoring.options.top_k == VOCABULARY
    assert f"the model has {VOCABULARY} words, so --top-k 1,000 writes all of them" in scoring.notes
    assert (scored_provenance(scoring).logprobs or {})["teacher"]["top_k"] == VOCABULARY


@pytest.mark.parametrize("ignored", [False, True])
def test_the_manifest_says_whether_a_column_is_over_kept_sets(tmp_path: Path, ignored: bool) -> None:
    student, _ = students(tmp_path)
    samples = [replace(each, kept=[[token] for token in each.tokens]) for each in rollouts()]
    packed = write_rows(tmp_path / "packed", as_trajectories(samples), [0] * len(samples))
    scoring = open_scoring(packed, student, ScoreOptions(device="cpu", ignore_temperature=ignored))
    assert ("kept_sets" in (scored_provenance(scoring).logprobs or {})["old"]) == (not ignored)


def test_rows_without_a_teacher_and_other_vocabularies_are_refused(treepack: Command, tmp_path: Path) -> None:
    student, _ = students(tmp_path)
    packed = rows_in(tmp_path / "packed")
    done = treepack("train", packed, "--model", student, "--loss", "distill", "--out", tmp_path / "out")
    assert done.status == 1
    assert "no term_teacher_topk_logprobs" in done.err
    assert "--column teacher --top-k" in done.err
    larger = tiny_config(tmp_path / "larger.json", vocab_size=64)
    options = ("--loss", "distill", "--teacher", larger, "--device", "cpu", "--out", tmp_path / "out")
    done = treepack("train", packed, "--model", student, *options)
    assert done.status == 1
    assert "its output layer has 64 words" in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column": "ref", "top_k": 3}, "top_k is about the column teacher"),
        ({"groups": "("}, "not a regular expression"),
    ],
)
def test_options_without_a_meaning_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        ScoreOptions(**options)
