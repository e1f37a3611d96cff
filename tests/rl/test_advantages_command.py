"""`treepack advantages`: its errors, its printed summary, and its output as the input of pack and train."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from support.command_line import Run
from support.oracle_model import tiny_config
from support.paths import ROOT
from support.refusal import refusal
from support.strategies import make
from treepack.rl.advantages.advantage_options import AdvantageOptions
from treepack.rl.advantages.estimate import estimate_advantages
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.store.trie_files import read_trie
from treepack.trie.trie import Trie, trajectories_of

# Group q has a missing reward, so both of its trajectories are dropped; p has rewards 1 and 0, two tokens each.
PRINTED = """\
trajectories                      4
groups compared                   1
groups rejected: rewards missing  1
trajectories left out             2
segments                          turn
subgroups                         0
advantages                        4, one per trained token
advantage, mean                   0
advantage, standard deviation     1
advantage, smallest               -1
advantage, median                 0
advantage, largest                1
advantage, zero                   0.0 %
"""


def trie_of(rewards: list[float | None], **fields: Any) -> Trie:
    return build_trie([make(f"t{i}", [7, i, i], reward=reward, **fields) for i, reward in enumerate(rewards)])


SINGLE = [make("a", [7, 1], reward=1.0, group="a"), make("b", [7, 2], reward=0.0, group="b")]
# trie, options, start of the message
BAD: list[tuple[Trie, dict[str, Any], str]] = [
    (trie_of([0.0, 1.0]), {"estimator": "ppo"}, "estimator is 'ppo'; expected one of grpo, dr-grpo"),
    (trie_of([0.0, 1.0]), {"estimator": "gae"}, "the trie has no token_values, the values of a critic, which gae"),
    (trie_of([0.0, 1.0]), {"estimator": "gae", "lam": 1.5}, "lam is 1.5; expected a number from 0 to 1"),
    (trie_of([0.0, 1.0]), {"estimator": "gae", "whiten": "all"}, "whiten is 'all'; expected one of none, group, batch"),
    (trie_of([0.0, 1.0]), {"estimator": "gae", "leaf_weights": True}, "leaf_weights is an option of grpo, dr-grpo"),
    (trie_of([0.0, 1.0]), {"estimator": "treepo", "gamma": 0.5}, "gamma is an option of gae; treepo has none"),
    (trie_of([0.0, 1.0]), {"estimator": "treepo", "edges": True}, "edges is an option of treerpo, tree-grpo, treerl"),
    (trie_of([0.0, 1.0]), {"estimator": "tree-grpo", "edges": True}, "edges needs an advantage per segment; give"),
    (trie_of([0.0, 1.0]), {"estimator": "grpo", "without_root": True}, "without_root is an option of treepo; grpo"),
    (trie_of([0.0, 1.0]), {"estimator": "grpo", "epsilon": -1.0}, "epsilon is -1.0; expected 0 or a small"),
    (trie_of([0.0, 1.0]), {"estimator": "treepo", "min_depth": -1}, "min_depth is -1; expected 0 or a number"),
    (trie_of([0.0, 1.0]), {"estimator": "treepo", "segment": "0"}, "segment is '0'; expected auto, recorded, turn"),
    (
        trie_of([None, 1.0]),
        {"estimator": "grpo"},
        r"no group is left to compare (rewards missing: 1 of 1 groups)",
    ),
    (build_trie(SINGLE), {"estimator": "rloo"}, "no group is left to compare (a single rollout: 2 of 2 groups); "),
    (trie_of([1e308, -1e308]), {"estimator": "grpo"}, "a reward of 1e+308 makes advantages overflow; give"),
    (build_trie([*trajectories_of(trie_of([0.0, 1.0]))], share="none"), {"estimator": "treepo"}, "--share none"),
    (trie_of([0.0, 1.0]), {"estimator": "treepo", "segment": "recorded"}, "no trajectory has 'segments' in its"),
]
BAD_OFFSETS: list[tuple[object, str]] = [
    ([1, 1], "'segments' does not ascend; expected the ascending token offsets"),
    ([0, 1], "'segments' leaves 1 .. 2, the tokens after the first"),
    ([3], "'segments' leaves 1 .. 2, the tokens after the first"),
    ([True], "'segments' is not a list of integers"),
    ("1 2", "'segments' is not a list of integers"),
]
BAD += [
    (trie_of([0.0, 1.0], metadata={"metadata": {"segments": offsets}}), {"estimator": "treepo"}, f"t0: {message}")
    for offsets, message in BAD_OFFSETS
]


@pytest.mark.parametrize(("trie", "options", "message"), BAD)
def test_what_cannot_be_used_is_refused(trie: Trie, options: dict[str, Any], message: str) -> None:
    assert message in refusal(lambda: estimate_advantages(trie, AdvantageOptions(**options)))


def test_segments_of_some_trajectories_only_are_refused() -> None:
    with_them = make("a", [7, 1, 1], reward=0.0, metadata={"segments": [1]})
    assert "made:b: its metadata has no 'segments' and that of other" in refusal(
        estimate_advantages, build_trie([with_them, make("b", [7, 2, 2], reward=1.0)]), AdvantageOptions("treerl")
    )


def test_the_command_writes_what_pack_and_train_take(treepack: Run, tmp_path: Path) -> None:
    sample = (ROOT / "sample_data" / "tokens.jsonl").read_text().splitlines(keepends=True)
    lines = [json.loads(line) for line in sample[:10]]
    # Short responses keep the training fast; segments start after the prompt and 8 tokens later.
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
        assert (done.status, done.notes) == (0, "")
        assert treepack("stats", out, "--check").status == 0
        assert treepack("pack", out, "--capacity", 1024, "--out", packed).status == 0
        trained = treepack(
            "train",
            packed,
            "--model",
            config,
            *"--loss grpo --steps 2 --device cpu --out".split(),
            tmp_path / f"{estimator}-trained",
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
    command = ("advantages", tmp_path / "trie", "--estimator", "treerl", "--segment", "turn", "--out")
    done = treepack(*command, tmp_path / "out")
    assert (done.status, done.notes) == (0, "")
    assert done.out == PRINTED
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["advantages"]["estimator"], manifest["totals"]["num_trajectories"]) == ("treerl", 2)
    again = treepack("advantages", tmp_path / "out", "--estimator", "grpo", "--out", tmp_path / "again")
    assert again.notes == f"note: {tmp_path / 'out'} has advantages already; they are replaced\n"
    assert read_trie(tmp_path / "again").trajectories["advantages"].null_count == 2
    refused = treepack(*command, tmp_path / "out")
    assert (refused.status, refused.err.count("\n")) == (1, 1)
    assert treepack(*command, tmp_path / "twin").status == 0
    files = [sorted((path.name, path.read_bytes()) for path in (tmp_path / name).iterdir()) for name in ("out", "twin")]
    assert files[0] == files[1]
    assert treepack("advantages", tmp_path / "none", "--estimator", "grpo", "--out", tmp_path / "new").status == 1
