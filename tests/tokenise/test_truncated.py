"""The option `truncated`: the loss of rollouts that a limit cut is masked, and their reward stays in the baseline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.byte_tokenizer import PLAIN, save
from support.command_line import Run
from treepack.errors import TreepackError
from treepack.files.manifest import read_manifest
from treepack.ingest.options import BuildOptions
from treepack.ingest.stream import read
from treepack.tokenise.tokenization import TRUNCATED_NOTE, load_tokenizer
from treepack.trajectory import Skipped, Tokens, Trajectory
from treepack.trie.store.trie_files import read_trie

ASK = {"role": "user", "content": "How many screws?"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("plain"), PLAIN)


def written(folder: Path, *records: dict[str, Any]) -> Path:
    path = folder / "r.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def tokens(reward: float, **more: Any) -> dict[str, Any]:
    return {"prompt_ids": [1, 2], "response_ids": [3, int(4 + reward)], "reward": reward, "group_id": "g", **more}


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [ASK, {"role": "assistant", "content": text}], **more}


def items(path: Path, **options: Any) -> list[Trajectory]:
    done: list[Trajectory | Skipped] = list(read([str(path)], BuildOptions(**options)))
    return [item for item in done if isinstance(item, Trajectory)]


def test_drop_takes_the_weight_of_truncated_rollouts_and_leaves_their_rewards(tmp_path: Path) -> None:
    path = written(tmp_path, tokens(1.0, finish_reason="stop"), tokens(0.0, finish_reason="length"))
    for truncated, weights in (("keep", [1.0, 1.0]), ("drop", [1.0, 0.0])):
        read_items = items(path, truncated=truncated)
        assert [item.weight for item in read_items] == weights
        assert [item.reward for item in read_items] == [1.0, 0.0]
        assert [TRUNCATED_NOTE in item.notes for item in read_items] == [weight == 0 for weight in weights]


@pytest.mark.parametrize("expand", ["trajectory", "turns"])
def test_drop_masks_every_turn_of_a_conversation_whose_last_answer_was_cut(
    tmp_path: Path, tokenizer: str, expand: str
) -> None:
    first = {"role": "assistant", "content": "Four.", "finish_reason": "stop"}
    last = {"role": "assistant", "content": "Fi", "finish_reason": "length"}
    path = written(tmp_path, {"messages": [ASK, first, ASK, last]}, {"messages": [ASK, last, ASK, first]})
    samples = items(path, tokenizer=tokenizer, truncated="drop", expand=expand)
    assert [sample.weight for sample in samples] == ([0.0, 1.0] if expand == "trajectory" else [0.0, 0.0, 1.0, 1.0])
    assert sum(TRUNCATED_NOTE in sample.notes for sample in samples) == 1


def test_drop_masks_a_text_that_was_decoded_without_an_end_token(tmp_path: Path, tokenizer: str) -> None:
    dump = {"prompt": "Screws? ", "seqlen": 2, "prompt_len": 1, "head_version": 0, "tail_version": 0}
    path = written(tmp_path, dump | {"completion": "Four<|im_end|>"}, dump | {"completion": "Fo"})
    whole, cut = items(path, tokenizer=tokenizer, truncated="drop")
    assert (whole.weight, cut.weight) == (1.0, 0.0)
    assert isinstance(whole.content, Tokens)
    assert isinstance(cut.content, Tokens)
    # Neither has an end token that its dump has not: "Fo" is cut, and the other text contains one.
    ids = load_tokenizer(tokenizer).encode
    assert whole.content.tokens.tolist() == [*ids("Screws? "), *ids("Four<|im_end|>")]
    assert cut.content.tokens.tolist() == [*ids("Screws? "), *ids("Fo")]


def test_the_baseline_of_the_group_counts_a_dropped_rollout(tmp_path: Path, treepack: Run) -> None:
    path = written(tmp_path, tokens(1.0, stop_reason="stop"), tokens(0.0, stop_reason="length"))
    treepack("build-trie", path, "--truncated", "drop", "--out", tmp_path / "trie")
    treepack("advantages", tmp_path / "trie", "--estimator", "dr-grpo", "--out", tmp_path / "advantages")
    table = read_trie(tmp_path / "advantages").trajectories
    # In the order of their tokens. Without the dropped rollout in the baseline, the advantage of the other one were 0.
    assert table["reward"].to_pylist() == [0.0, 1.0]
    assert table["advantage"].to_pylist() == [-0.5, 0.5]
    assert table["weight"].to_pylist() == [0.0, 1.0]


def test_the_manifest_names_the_option_only_if_it_is_set(tmp_path: Path, treepack: Run) -> None:
    path = written(tmp_path, tokens(1.0), tokens(0.0))
    for truncated in ("keep", "drop"):
        treepack("build-trie", path, "--truncated", truncated, "--out", tmp_path / truncated)
    assert "truncated" not in read_manifest(tmp_path / "keep")["options"]
    assert read_manifest(tmp_path / "drop")["options"]["truncated"] == "drop"


def test_an_unknown_value_is_refused() -> None:
    with pytest.raises(TreepackError, match="truncated is 'mask'; expected one of keep, drop"):
        BuildOptions(truncated="mask")
