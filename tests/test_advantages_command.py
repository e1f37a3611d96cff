"""`treepack advantages`: what it writes is what pack and train take, and what it prints is what it did."""

from __future__ import annotations

import json
import math
from importlib import import_module
from pathlib import Path

from command_line import Run
from oracle_model import tiny_config

from treepack.rl.advantages import ESTIMATORS
from treepack.shards import read_trie

ROOT = Path(__file__).parents[1]
PRINTED = """\
trajectories                      4
groups compared                   1
groups rejected: rewards missing  1
trajectories left out             2
subgroups                         0
advantages                        4, one per trained token
advantage, mean                   0
advantage, standard deviation     1
advantage, smallest               -1
advantage, median                 0
advantage, largest                1
advantage, zero                   0.0 %
"""


def test_the_command_writes_what_pack_and_train_take(treepack: Run, tmp_path: Path) -> None:
    sample = (ROOT / "sample_data" / "tokens.jsonl").read_text().splitlines(keepends=True)
    lines = [json.loads(line) for line in sample[:10]]
    for line in lines:
        line["response_ids"], line["response_mask"] = line["response_ids"][:40], line["response_mask"][:40]
        line["rollout_log_probs"] = line["rollout_log_probs"][:40]
        line["metadata"] = {"segments": [len(line["prompt_ids"]), len(line["prompt_ids"]) + 8]}
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert treepack("build-trie", tmp_path / "rollouts.jsonl", "--out", tmp_path / "trie").status == 0
    config = tiny_config(tmp_path / "tiny.json", vocab_size=1464, max_position_embeddings=2048)
    for estimator in ("treepo", "treerl"):
        out, packed = tmp_path / estimator, tmp_path / f"{estimator}-packed"
        done = treepack("advantages", tmp_path / "trie", "--estimator", estimator, "--out", out)
        assert (done.status, done.err) == (0, "")
        assert treepack("stats", out, "--check").status == 0
        assert treepack("pack", out, "--capacity", 1024, "--out", packed).status == 0
        trained = treepack(
            *("train", packed, "--model", config, "--loss", "grpo", "--steps", 2, "--device", "cpu"),
            *("--out", tmp_path / f"{estimator}-trained"),
        )
        assert trained.status == 0, trained.err
        losses = (tmp_path / f"{estimator}-trained" / "metrics.jsonl").read_text().splitlines()
        assert [math.isfinite(json.loads(line)["loss"]) for line in losses] == [True, True]


def test_the_command_prints_what_it_compared_and_left_out(treepack: Run, tmp_path: Path) -> None:
    rows = [("p", 1.0, 1), ("p", 0.0, 2), ("q", None, 3), ("q", 1.0, 4)]
    text = "".join(
        json.dumps(
            {"id": f"r{last}", "group_id": group, "reward": reward, "input_ids": [5, 6, last], "loss_mask": [0, 1, 1]}
        )
        + "\n"
        for group, reward, last in rows
    )
    (tmp_path / "rollouts.jsonl").write_text(text)
    assert treepack("build-trie", tmp_path / "rollouts.jsonl", "--out", tmp_path / "trie").status == 0
    given = ("advantages", tmp_path / "trie", "--estimator", "treerl", "--segment", "turn", "--out")
    done = treepack(*given, tmp_path / "out")
    assert (done.status, done.err) == (0, "")
    assert done.out == PRINTED
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["advantages"]["estimator"], manifest["totals"]["num_trajectories"]) == ("treerl", 2)
    again = treepack("advantages", tmp_path / "out", "--estimator", "grpo", "--out", tmp_path / "again")
    assert again.err == f"note: the advantages that {tmp_path / 'out'} has are replaced\n"
    assert read_trie(tmp_path / "again").trajectories["advantages"].null_count == 2
    refused = treepack(*given, tmp_path / "out")
    assert (refused.status, refused.err.count("\n")) == (1, 1)
    assert treepack("advantages", tmp_path / "none", "--estimator", "grpo", "--out", tmp_path / "new").status == 1


def test_the_command_offers_the_estimators_of_the_library() -> None:
    assert import_module("treepack_cli.advantages").ESTIMATORS == ESTIMATORS
