"""`treepack values fit` and `predict`: the predictor ranks unseen prompts, and unsuitable input is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.command_line import Run as Command
from support.oracle_model import tiny_config
from support.refusal import refusal
from treepack.errors import TreepackError
from treepack.research.predictor.fit import fit, open_fit
from treepack.research.predictor.fit_data import FitOptions, read_fit_data
from treepack.research.predictor.model import load_values, node_values
from treepack.research.predictor.rows import anchor_prefixes, anchor_rows, draw_nodes
from treepack.research.trace.predictions import read_predictions
from treepack.research.trace.targets import anchors, binary_rewards, recursive_targets, spearman
from treepack.train.options import TrainOptions
from treepack.train.watch.metrics import read_metrics
from treepack.trie.store.trie_files import read_trie


def rollout_records(groups: range, *, seed: int = 0) -> list[dict[str, Any]]:
    """Return rollouts of two turns whose chance of success is (a token of the prompt - 20) / 9; the rest is noise."""
    rng = np.random.default_rng([seed, groups.start])
    records = []
    for group in groups:
        prompt = [1, *rng.integers(10, 20, 3).tolist(), 20 + group % 10, 2]
        for trial in range(4):
            first, second = (rng.integers(30, 48, 3).tolist() for _ in range(2))
            ids = [*prompt, *first, 3, *second]
            mask = [*[0] * len(prompt), 1, 1, 1, 0, 1, 1, 1]  # two turns of three tokens; token 3 is the user's
            success = int(rng.random() < (group % 10) / 9)
            name = f"task-{group:03}"
            records.append(
                {"id": f"{name}/{trial}", "group_id": name, "reward": success, "input_ids": ids, "loss_mask": mask}
            )
    return records


def write_trie(treepack: Command, path: Path, records: list[dict[str, Any]]) -> Path:
    file = path.with_suffix(".jsonl")
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    done = treepack("build-trie", file, "--out", path)
    assert (done.status, done.notes) == (0, "")
    return path


FAST = ("--capacity", 128, "--lr", 5e-3, "--rows-per-step", 4, "--device", "cpu")


def test_fitting_ranks_prompts_that_were_held_out_and_serves_allocate_and_stats(
    treepack: Command, tmp_path: Path
) -> None:
    seen = write_trie(treepack, tmp_path / "seen", rollout_records(range(150)))
    unseen = write_trie(treepack, tmp_path / "unseen", rollout_records(range(150, 190)))
    config, out, file = tiny_config(tmp_path / "config.json"), tmp_path / "values", tmp_path / "values.jsonl"
    options = ("--prefix-share", 0.1, "--epochs", 12)
    done = treepack("values", "fit", seen, "--model", config, "--out", out, *FAST, *options)
    assert (done.status, done.notes) == (0, "")
    assert re.search(r"^prompts +150$", done.out, re.MULTILINE)
    assert re.search(r"^prefixes +17$", done.out, re.MULTILINE)  # a tenth of all
    metrics = read_metrics(out / "metrics.jsonl")
    assert metrics["loss"][-1] < 0.7 * metrics["loss"][0]

    done = treepack("values", "predict", unseen, "--values", out, "--out", file, "--device", "cpu")
    assert (done.status, done.notes) == (0, "")
    predictions = read_predictions(file)
    assert len(predictions.group_ids) == 40
    assert len(predictions.prefix_value) == 160  # 40 groups of 4 rollouts, each with one prefix, after its first turn
    chance = np.array([int(name[-3:]) % 10 / 9 for name in predictions.group_ids])  # "task-157" -> 7/9
    assert (spearman(predictions.root_value, chance).rho or 0) > 0.8

    done = treepack("stats", unseen, "--predictions", file, "--json")
    assert done.json["spearman"]["root"]["rho"] > 0.5  # type: ignore[index]
    roots = treepack("allocate", "roots", file, "--budget", 80, "--out", tmp_path / "roots.jsonl")
    assert (roots.status, roots.notes) == (0, "")
    allocate_options = ("--predictions", file, "--expand", 1, "--out", tmp_path / "prefixes.jsonl")
    assert treepack("allocate", "prefixes", unseen, *allocate_options).status == 0


def small_fit(treepack: Command, tmp_path: Path, *options: object) -> tuple[Path, Path]:
    trie, out = tmp_path / "trie", tmp_path / "values"
    if not trie.exists():
        write_trie(treepack, trie, rollout_records(range(4)))
    config = tiny_config(tmp_path / "config.json")
    done = treepack("values", "fit", trie, "--model", config, "--out", out, *FAST, *options)
    assert (done.status, done.notes) == (0, "")
    return trie, out


def test_the_same_fit_has_the_same_bytes(treepack: Command, tmp_path: Path) -> None:
    contents = []
    for options in ((), ("--overwrite",)):
        _, out = small_fit(treepack, tmp_path, *options)
        contents.append({path.name: path.read_bytes() for path in out.iterdir() if path.name != "metrics.jsonl"})
    assert contents[0] == contents[1]
    assert {"head.safetensors", "model.safetensors", "values.json"} < contents[0].keys()


def test_a_frozen_backbone_stays_and_runs_once_per_row(treepack: Command, tmp_path: Path) -> None:
    _, out = small_fit(treepack, tmp_path, "--freeze", "--epochs", 3, "--lr", 0.1)
    metrics = read_metrics(out / "metrics.jsonl")
    assert metrics["tokens"][0] > 0
    # In later epochs the backbone computes nothing.
    assert [tokens for tokens, epoch in zip(metrics["tokens"], metrics["epoch"], strict=True) if epoch] == [0, 0]
    fitted = load_values(out, device="cpu")
    small_fit(treepack, tmp_path, "--freeze", "--epochs", 1, "--lr", 0.0, "--overwrite")  # the weights of the start
    start = load_values(out, device="cpu")
    for name, value in start.loaded.model.state_dict().items():
        assert torch.equal(value, fitted.loaded.model.state_dict()[name]), name
    assert not torch.equal(start.head.weight, fitted.head.weight)


def test_a_fit_can_start_from_the_head_of_an_earlier_one(treepack: Command, tmp_path: Path) -> None:
    trie, out = small_fit(treepack, tmp_path, "--epochs", 8)
    again = tmp_path / "again"
    done = treepack("values", "fit", trie, "--model", out, "--out", again, *FAST)
    assert (done.status, done.notes) == (0, f"note: the head of {out} is used and fitted further\n")
    # Its first loss is the last state of the first fit, so the head was loaded too.
    first = read_metrics(again / "metrics.jsonl")["loss"][0]
    assert first == pytest.approx(_loss(out, trie), rel=1e-4)
    assert first < read_metrics(out / "metrics.jsonl")["loss"][0]


def _loss(values: Path, trie: Path) -> float:
    trie_value = read_trie(trie)
    ends = anchors(trie_value)
    prefixes = anchor_prefixes(trie_value, ends)
    nodes = draw_nodes(prefixes, prefix_share=FitOptions().prefix_share, seed=0)
    rows = anchor_rows(prefixes, nodes, capacity=128)
    target = recursive_targets(ends.tree, binary_rewards(trie_value), None)[0]
    value = node_values(load_values(values, device="cpu"), rows, num_inner=len(prefixes.owner))
    return float(np.square(value[nodes] - target[nodes]).mean())


def test_what_cannot_be_fitted_is_one_sentence_and_leaves_nothing(treepack: Command, tmp_path: Path) -> None:
    records = rollout_records(range(3, 6))
    config = tiny_config(tmp_path / "config.json")
    small = tiny_config(tmp_path / "small.json", vocab_size=30)
    cases = [
        ([records[0] | {"reward": 0.5}, *records[1:]], config, (), "has the reward 0.5; TRACE needs 0 for failure"),
        ([records[0] | {"reward": 0.9999999}, *records[1:]], config, (), "has the reward 0.9999999; TRACE needs 0"),
        (records, small, (), "and the vocabulary ends at 29; use the model whose tokenizer made the data"),
        (records, config, ("--capacity", 9), "has 10 tokens and rows hold 9; give --capacity 10 or more"),
        (records, config, ("--segment", "recorded"), "no trajectory has 'segments' in its metadata"),
        (records, tmp_path / "nowhere.json", (), "nowhere.json: no such file or folder; give the folder of a model"),
    ]
    for number, (rollouts, model, options, message) in enumerate(cases):
        trie, place = write_trie(treepack, tmp_path / f"trie{number}", rollouts), tmp_path / f"place{number}"
        place.mkdir()
        every = ("--prefix-share", 1, *FAST, *options)
        done = treepack("values", "fit", trie, "--model", model, "--out", place / "values", *every)
        assert (done.status, done.out) == (1, ""), message
        assert message in done.err
        assert done.err.count("\n") == 1
        assert list(place.iterdir()) == []


def test_a_loss_that_is_not_finite_ends_the_fit_and_leaves_nothing(treepack: Command, tmp_path: Path) -> None:
    trie = write_trie(treepack, tmp_path / "trie", rollout_records(range(3, 6)))
    run = open_fit(read_fit_data(trie, FitOptions(TrainOptions(device="cpu"))), tiny_config(tmp_path / "config.json"))
    with torch.no_grad():
        run.model.head.bias.fill_(torch.nan)  # the first loss is NaN
    place = tmp_path / "place"
    place.mkdir()
    assert refusal(list, fit(run, place / "values")).startswith(
        "the loss or gradient of step 1 is not finite; lower --lr"
    )
    assert list(place.iterdir()) == []


def test_what_cannot_be_predicted_is_one_sentence_and_leaves_nothing(treepack: Command, tmp_path: Path) -> None:
    trie, out = small_fit(treepack, tmp_path)
    # The same groups in two training steps; a token beyond the vocabulary of 50; a head with the right size.
    steps = [one | {"step": step, "id": f"{step}{one['id']}"} for step in range(2) for one in rollout_records(range(2))]
    several = write_trie(treepack, tmp_path / "several", steps)
    strange = [one | {"input_ids": [55, *one["input_ids"][1:]]} for one in rollout_records(range(2))]
    beyond = write_trie(treepack, tmp_path / "beyond", strange)
    altered = tmp_path / "altered"
    altered.mkdir()
    for path in out.iterdir():
        (altered / path.name).write_bytes(path.read_bytes())
    (altered / "head.safetensors").write_bytes(b"0" * (out / "head.safetensors").stat().st_size)
    place = tmp_path / "place"
    place.mkdir()
    cases = [
        (several, out, "v.jsonl", (), "one value per group_id and the trie has several training steps of one; build"),
        (beyond, out, "v.jsonl", (), "holds the token id 55 and the vocabulary ends at 49; use the model whose"),
        (trie, out, "v.csv", (), "its name must end in .jsonl or .parquet, which selects the format"),
        (trie, out, "v.jsonl", ("--capacity", 3), "tokens and rows hold 3; give --capacity 10 or more"),
        (trie, altered, "v.jsonl", (), "head.safetensors: was altered since it was written"),
        (trie, trie, "v.jsonl", (), "values.json: cannot be read (No such file or directory); expected a directory"),
    ]
    for directory, values, name, options, message in cases:
        done = treepack(
            "values", "predict", directory, "--values", values, "--out", place / name, "--device", "cpu", *options
        )
        assert (done.status, done.out) == (1, ""), message
        assert message in done.err
        assert done.err.count("\n") == 1
        assert list(place.iterdir()) == []


def test_predictions_of_one_trie_are_refused_for_another(treepack: Command, tmp_path: Path) -> None:
    trie, out = small_fit(treepack, tmp_path)
    file = tmp_path / "values.parquet"
    command = ("values", "predict", trie, "--values", out, "--device", "cpu", "--out")
    assert treepack(*command, file).status == 0
    assert treepack(*command, file, "--overwrite").status == 0  # its own output, unlike the rollouts in the next line
    assert "was not written by treepack" in treepack(*command, trie.with_suffix(".jsonl"), "--overwrite").err
    other = write_trie(treepack, tmp_path / "other", rollout_records(range(4, 8)))
    done = treepack("allocate", "prefixes", other, "--predictions", file, "--expand", 1, "--out", tmp_path / "p.jsonl")
    assert done.status == 1
    assert "of the trie's 16 prefixes have no value" in done.err


@pytest.mark.parametrize(
    "damage", ["{", "[]", '{"format": "treepack-values"}', '{"format": 1, "version": 1, "files": []}']
)
def test_a_damaged_record_is_named(tmp_path: Path, damage: str) -> None:
    (tmp_path / "values.json").write_text(damage)
    with pytest.raises(TreepackError, match=r"/values\.json: (is damaged|holds 1 version 1; expected)"):
        load_values(tmp_path, device="cpu")


def test_options_that_make_no_sense_are_refused() -> None:
    for name, value in (("capacity", 0), ("prefix_share", 1.5), ("prefix_share", float("nan"))):
        assert refusal(replace, FitOptions(), **{name: value}).startswith(f"{name} is {value}; expected")
