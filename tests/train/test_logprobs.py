"""`treepack logprobs` and distillation by commands: every token scored once, teachers written or scored."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.command_line import Run as Command
from support.oracle_distillation import laws_of
from support.oracle_model import VOCABULARY, packed_directory, tiny_config, write_rows
from support.oracle_objectives import own_logprobs
from support.packed_objectives import as_trajectories, packed_model, plain, rollouts
from support.refusal import refusal
from support.written_rollouts import write_rollouts
from treepack.errors import TreepackError
from treepack.pack.files import read_rows
from treepack.pack.row import Row
from treepack.train.logprobs import open_scoring, scored_provenance, scored_rows, term_scores
from treepack.train.scoring_options import ScoreOptions
from treepack.train.setup.compute import ComputeSetting

# The row of each of the ten rollouts: all in one row, two rows, and a row each.
PACKINGS = [[0] * 10, [i % 2 for i in range(10)], list(range(10))]


@pytest.mark.parametrize("rows", PACKINGS)
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_every_term_is_scored_as_its_trajectory_alone(tmp_path: Path, kind: str, rows: list[int]) -> None:
    recorded = rollouts(kind)
    path = write_rows(tmp_path / "packed", as_trajectories(recorded), rows)
    seen = 0
    for row in read_rows(path):
        assert row.terms is not None
        scores = np.stack(term_scores(packed_model(kind), [row], ScoreOptions(loss_chunk=3))[0][:2])
        for i, name in enumerate(row.trajectory_ids):
            rollout = recorded[int(name[1:])]  # "t7" -> rollout 7
            with torch.no_grad():
                alone = [list(values.values()) for values in own_logprobs(plain(kind), rollout)]
            np.testing.assert_allclose(scores[:, row.terms.trajectory == i], np.array(alone), rtol=1e-9)
            seen += 1
    assert seen == len(recorded)


def test_a_model_computes_each_token_of_a_row_once(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "packed", as_trajectories(rollouts()), PACKINGS[0])
    (row,) = read_rows(path)
    loaded, seen = packed_model("qwen3"), []
    hook = loaded.model.base_model.register_forward_pre_hook(
        lambda module, args, keywords: seen.append(keywords["input_ids"].numel()), with_kwargs=True
    )
    term_scores(loaded, [row], ScoreOptions())[0]
    hook.remove()
    assert seen == [row.num_tokens]
    assert row.num_tokens < row.scale.sum()  # fewer than its trajectories have in total, so prefixes are shared


def columns(row: Row, *, without: set[str]) -> dict[str, Any]:
    assert row.terms is not None
    values = {name: getattr(row, name) for name in (f.name for f in fields(row)) if name != "terms"}
    values |= {f"terms.{f.name}": getattr(row.terms, f.name) for f in fields(row.terms)}
    return {name: np.asarray(v).tolist() for name, v in values.items() if v is not None and name not in without}


def test_the_command_adds_columns_and_changes_nothing_else(treepack: Command, tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "tiny.json")
    rollouts_file = write_rollouts(tmp_path / "rollouts.jsonl")
    assert treepack("build-trie", rollouts_file, "--out", tmp_path / "trie").status == 0
    assert treepack("pack", tmp_path / "trie", "--capacity", 12, "--out", tmp_path / "packed").status == 0
    common = ("--model", config, "--device", "cpu")
    done = treepack("logprobs", tmp_path / "packed", *common, "--out", tmp_path / "old", "--entropies", "--quiet")
    assert (done.status, done.notes) == (0, "")
    done = treepack("logprobs", tmp_path / "old", *common, "--out", tmp_path / "both", "--column", "ref")
    assert done.status == 0
    new = {"terms.old_logprob", "terms.ref_logprob", "terms.entropy"}
    for before, after in zip(read_rows(tmp_path / "packed"), read_rows(tmp_path / "both"), strict=True):
        assert columns(before, without=set()) == columns(after, without=new)
        assert after.terms is not None
        assert after.terms.entropy is not None
        assert after.terms.old_logprob is not None
        assert after.terms.ref_logprob is not None
        assert (after.terms.entropy > 0).all()
        assert (after.terms.old_logprob < 0).all()
        assert after.terms.old_logprob.tolist() == after.terms.ref_logprob.tolist()
    manifest = json.loads((tmp_path / "both" / "manifest.json").read_text())
    assert {name: how["model"] for name, how in manifest["logprobs"].items()} == {
        "old": str(config),
        "ref": str(config),
    }
    assert treepack("stats", tmp_path / "both", "--check", "--trie", tmp_path / "trie").status == 0


def test_training_starts_with_ratios_of_one_on_its_own_logprobs(treepack: Command, tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "tiny.json")
    trajectories = as_trajectories(rollouts(), without=["old_logprobs", "ref_logprobs"])
    packed = write_rows(tmp_path / "packed", trajectories, PACKINGS[1])
    common = ("--model", config, "--device", "cpu")
    # packed -> old, with term_old_logprob -> ref, with term_ref_logprob too
    for source, column in (("packed", "old"), ("old", "ref")):
        done = treepack("logprobs", tmp_path / source, *common, "--column", column, "--out", tmp_path / column)
        assert done.status == 0
    assert packed.is_dir()
    options = ("--loss", "grpo", "--kl", "0.1", "--steps", "1", "--out", tmp_path / "model")
    assert treepack("train", tmp_path / "ref", *common, *options).status == 0
    line = json.loads((tmp_path / "model" / "metrics.jsonl").read_text())
    # At the first step the policy is the model that scored the tokens: ratio 1, no divergence, nothing clipped.
    assert line["ratio"] == pytest.approx(1, abs=1e-5)
    assert line["kl"] == pytest.approx(0, abs=1e-9)
    assert line["clip_fraction_low"] == line["clip_fraction_high"] == 0
    assert treepack("train", tmp_path / "ref", *common, "--loss", "dpo", "--verify").status == 0


def test_a_run_in_another_dtype_notes_the_size_of_the_difference(treepack: Command, tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "tiny.json")
    trajectories = as_trajectories(rollouts(), without=["old_logprobs", "ref_logprobs"])
    write_rows(tmp_path / "packed", trajectories, PACKINGS[1])
    common = ("--model", config, "--device", "cpu")
    for source, column, dtype in (("packed", "old", "fp32"), ("old", "ref", "bf16")):
        options = (*common, "--column", column, "--dtype", dtype, "--out", tmp_path / column)
        assert treepack("logprobs", tmp_path / source, *options).status == 0
    train = ("train", tmp_path / "ref", *common, "--steps", "1", "--loss", "grpo", "--dtype", "fp32")
    notes = treepack(*train, "--kl", "0.1", "--kl-estimator", "k1", "--out", tmp_path / "a").err
    found = re.search(r"than this run's fp32 \(ref in bf16\), and this model's own differ by (\S+) nats", notes)
    assert found, notes
    assert 1e-5 < float(found[1]) < 0.1
    assert "the gradient of --kl-estimator k1 is 0 in the mean" in notes
    without = treepack(*train, "--out", tmp_path / "b")  # reads old alone
    assert without.status == 0
    assert "another dtype" not in without.err
    assert "k1" not in without.err


def test_weights_in_16_bits_score_as_float32_ones_under_autocast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "packed", as_trajectories(rollouts()), PACKINGS[1])
    config, options = tiny_config(tmp_path / "tiny.json"), ScoreOptions(device="cpu", dtype="bf16")
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        scoring = open_scoring(path, config, options)
        assert scoring.loaded.causal.model.layers[0].mlp.up_proj.weight.dtype == dtype
        results.append([row.terms.old_logprob for row in scored_rows(scoring) if row.terms is not None])
        monkeypatch.setattr(ComputeSetting, "lower_products", lambda *_: None)
    assert all(np.array_equal(mine, expected) for mine, expected in zip(*results, strict=True))


def test_a_column_that_was_there_is_replaced_with_a_note(tmp_path: Path) -> None:
    packed = write_rows(tmp_path / "packed", as_trajectories(rollouts()), PACKINGS[0])
    scoring = open_scoring(packed, tiny_config(tmp_path / "tiny.json"), ScoreOptions(device="cpu"))
    assert [note for note in scoring.notes if "term_old_logprob" in note]
    (before,), (after,) = read_rows(packed), scored_rows(scoring)
    assert before.terms is not None
    assert after.terms is not None
    assert np.asarray(before.terms.old_logprob).tolist() != np.asarray(after.terms.old_logprob).tolist()


def test_what_is_not_finite_leaves_nothing_behind(
    treepack: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = write_rows(tmp_path / "packed", as_trajectories(rollouts()), PACKINGS[0])
    scoring = open_scoring(packed, tiny_config(tmp_path / "tiny.json"), ScoreOptions(device="cpu"))
    with torch.no_grad():
        scoring.loaded.model.get_input_embeddings().weight.fill_(torch.nan)
    monkeypatch.setattr("treepack.train.logprobs.open_scoring", lambda *_: scoring)  # the model with NaN weights
    done = treepack("logprobs", packed, "--model", tmp_path / "tiny.json", "--out", tmp_path / "there" / "out")
    assert done.status == 1
    assert "a log-probability of row 0 is not finite" in done.err
    assert not (tmp_path / "there").exists()


def test_rows_without_terms_and_unknown_choices_are_refused(tmp_path: Path) -> None:
    trajectories = as_trajectories(
        rollouts(), without=["advantages", "old_logprobs", "ref_logprobs", "sampling_logprobs", "reward"]
    )
    packed = packed_directory(tmp_path / "packed", trajectories, capacity=100)
    assert "its rows have no terms to write log-probabilities for" in refusal(
        open_scoring, packed, tmp_path / "no-such-model", ScoreOptions(device="cpu")
    )
    assert "column is 'new'; expected one of old, ref" in refusal(ScoreOptions, column="new")


def test_a_lack_of_memory_is_one_sentence(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "packed", as_trajectories(rollouts()), PACKINGS[0])
    scoring = open_scoring(path, tiny_config(tmp_path / "tiny.json"), ScoreOptions(device="cpu"))

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    scoring.loaded.model.base_model.layers[1].register_forward_hook(fails)
    with pytest.raises(
        TreepackError,
        match=r"^out of memory in row 0 of \d+ tokens with the smallest plan \(.* 64 targets\)"
        r", and [\d.]+ GiB are free; compute with",
    ):
        next(scored_rows(scoring))


def test_rows_are_scored_alone_or_in_pieces_if_memory_runs_out(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "packed", as_trajectories(rollouts()), PACKINGS[1])
    config = tiny_config(tmp_path / "tiny.json")
    sizes = [row.num_tokens for row in read_rows(path)]
    expected, scored, recorded = list[Any](), list[Any](), list[Any]()
    for results, limit in ((expected, None), (scored, max(sizes))):
        scoring = open_scoring(path, config, ScoreOptions(device="cpu", pass_tokens=sum(sizes)))

        def check(_: Any, __: Any, options: Any, limit: int | None = limit) -> None:
            if limit is not None and options["input_ids"].numel() > limit:
                raise torch.OutOfMemoryError

        scoring.loaded.causal.base_model.register_forward_pre_hook(check, with_kwargs=True)
        results.extend(row.terms.old_logprob for row in scored_rows(scoring) if row.terms is not None)
        recorded.append((scored_provenance(scoring).logprobs or {})["old"])
    # The second run ended with passes of one row each.
    assert recorded[0].pop("pass_tokens") == sum(sizes)
    assert recorded[0] == recorded[1]
    assert len(expected) == len(scored) == 2
    for before, after in zip(expected, scored, strict=True):
        assert before is not None
        assert after is not None
        np.testing.assert_allclose(after, before, rtol=1e-5)


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
