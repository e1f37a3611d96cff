"""`treepack augment` for a rollout system: its output, its errors, and the way of new rollouts back into training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from support.byte_tokenizer import PLAIN, save
from support.command_line import Run
from support.oracle_model import Sample, alone, tiny_config
from support.packed_gradients import assert_equal, gradients_of, packed, plain
from treepack.data.batch import make_batch
from treepack.pack.files import read_rows
from treepack.pack.row import Row
from treepack.trajectory import Tokens, positions
from treepack.trie.store.trie_files import read_trie
from treepack.trie.trie import trajectories_of


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def first_rollouts() -> list[dict[str, Any]]:
    """Return rollouts of two tasks: four each, of twelve tokens, three of them successful."""
    rng = np.random.default_rng(3)
    return [
        {
            "id": f"r{i}",
            "group_id": f"task{i // 4}",
            "reward": float(i % 4 > 0),
            "prompt_ids": [40 + i // 4, 41, 42, 43],
            "response_ids": [3, 3, *rng.integers(0, 30, 10).tolist()],
        }
        for i in range(8)
    ]


def continuations(queries: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield two rollouts of each query: one as prompt and response, one whole with a mask that trains reused tokens."""
    rng = np.random.default_rng(4)
    for query in queries:
        prompt, size = query["prompt_token_ids"], len(query["prompt_token_ids"])
        # The second record has the fields in extra_info, one of the places where readers look.
        passed_on = {name: value for name, value in query.items() if name != "prompt_token_ids"}
        response, other = (rng.integers(0, 30, 5).tolist() for _ in range(2))
        yield {**query, "response_ids": response, "reward": 1.0}
        mask = [0] * (size - query["num_reused"]) + [1] * (query["num_reused"] + 5)
        yield {
            "group_id": query["group_id"],
            "reward": 0.0,
            "extra_info": passed_on,
            "input_ids": prompt + other,
            "loss_mask": mask,
        }


def test_rollouts_of_augmented_queries_come_back_without_a_gradient_on_reused_tokens(
    treepack: Run, tmp_path: Path
) -> None:
    def run(*arguments: object) -> str:
        done = treepack(*arguments)
        assert done.status == 0, done.err
        return done.out

    first = write_lines(tmp_path / "first.jsonl", first_rollouts())
    model = tiny_config(tmp_path / "tiny.json")
    run("build-trie", first, "--out", tmp_path / "trie")
    run("pack", tmp_path / "trie", "--capacity", 64, "--out", tmp_path / "packed")
    run("logprobs", tmp_path / "packed", "--model", model, "--entropies", "--device", "cpu", "--out", tmp_path / "old")
    run("augment", tmp_path / "trie", "--packed", tmp_path / "old", "--out", tmp_path / "augmented.jsonl")
    queries = [json.loads(line) for line in (tmp_path / "augmented.jsonl").read_text().splitlines()]
    assert len(queries) == 6
    assert {query["parent_trajectory"] for query in queries} == {"r1", "r2", "r3", "r5", "r6", "r7"}
    second = write_lines(tmp_path / "second.jsonl", list(continuations(queries)))
    printed = run("build-trie", first, second, "--out", tmp_path / "both")
    assert "reused tokens not trained: 6" in printed
    run("pack", tmp_path / "both", "--capacity", 4096, "--out", tmp_path / "again")

    trie, (row,) = read_trie(tmp_path / "both"), list(read_rows(tmp_path / "again"))
    both = list(trajectories_of(trie))
    samples = []
    for trajectory in both:
        content = trajectory.content
        assert isinstance(content, Tokens)
        weights = np.zeros(len(content.tokens))
        weights[positions(content.starts, content.ends)] = 1.0
        samples.append(Sample(tuple(content.tokens.tolist()), tuple(weights.tolist())))
    # The trie and the row contain each prefix once, and old rollouts still train the tokens that new ones reuse.
    prefixes = {sample.tokens[:n] for sample in samples for n in range(1, len(sample.tokens) + 1)}
    assert len(prefixes) == trie.tokens_tree == row.num_tokens
    assert row.terms is not None
    reused = {tuple(query["prompt_token_ids"]): query["num_reused"] for query in queries}
    checked = 0
    for i, name in enumerate(row.trajectory_ids):
        trained = row.position_ids[row.terms.token[row.terms.trajectory == i]]
        if "~" not in row.trajectory_groups[i]:
            assert trained.min() == 4, name  # an old rollout: all tokens after its prompt of four
            continue
        # A new rollout: only its own five tokens.
        size = row.position_ids[row.trajectory_ends[i]] + 1 - 5
        assert trained.tolist() == list(range(size, size + 5))
        checked += 1
    assert checked == 12
    for prompt, num_reused in reused.items():
        at = path_of(row, prompt)[len(prompt) - num_reused :]
        # Old rollouts that start with this prompt, each of which weighs its last token by 1.
        olds = sum(
            tuple(line["prompt_ids"] + line["response_ids"])[: len(prompt)] == prompt for line in first_rollouts()
        )
        assert row.loss_weight[at[-1]] == olds > 0
    # The gradient of the row equals the sum over single rollouts, in which new ones weigh reused tokens by 0.
    assert_equal(gradients_of(packed("qwen3", "reference"), [make_batch(row)]), alone(plain("qwen3"), samples))

    run("advantages", tmp_path / "both", "--estimator", "grpo", "--keep-equal", "--out", tmp_path / "credited")
    run("pack", tmp_path / "credited", "--capacity", 64, "--out", tmp_path / "final")
    train = ("train", tmp_path / "final", "--model", model, "--loss", "grpo", "--steps", 2, "--device", "cpu")
    run(*train, "--out", tmp_path / "trained")


def path_of(row: Row, prompt: tuple[int, ...]) -> list[int]:
    """Return the row indices of the tokens of `prompt`, from the root."""
    # Exactly one place in the row ends this prefix, because equal prefixes are stored once.
    (end,) = (
        i
        for i in range(row.num_tokens)
        if row.position_ids[i] == len(prompt) - 1 and tuple(tokens_above(row, i)[1]) == prompt
    )
    return tokens_above(row, end)[0]


def tokens_above(row: Row, at: int) -> tuple[list[int], list[int]]:
    path = []
    while at >= 0:
        path.append(at)
        at = int(row.parent[at])
    path.reverse()
    return path, row.input_ids[path].tolist()


def test_rollouts_whose_end_was_cut_off_are_used_if_three_quarters_were_packed(treepack: Run, tmp_path: Path) -> None:
    first, trie = write_lines(tmp_path / "first.jsonl", first_rollouts()), tmp_path / "trie"
    assert treepack("build-trie", first, "--out", trie).status == 0
    model = tiny_config(tmp_path / "tiny.json")
    queries, printed = {}, {}
    # Capacity for 12, 9 and 8 of the twelve trained tokens: all, exactly three quarters, and too few.
    for kept in (12, 9, 8):
        rows, scored, out = (tmp_path / f"{name}{kept}" for name in ("rows", "scored", "queries.jsonl"))
        packing = ("--capacity", 4 + kept, "--too-long", "truncate", "--out", rows)
        assert treepack("pack", trie, *packing).status == 0
        scoring = ("--model", model, "--entropies", "--device", "cpu", "--out", scored)
        assert treepack("logprobs", rows, *scoring).status == 0
        done = treepack("augment", trie, "--packed", scored, "--out", out)
        assert done.status == 0, done.err
        queries[kept], printed[kept] = out.read_text(), done.out
    assert len(queries[12].splitlines()) == 6
    assert queries[9] == queries[12]
    assert queries[8] == ""
    assert "rollouts cut off in the packed rows, before three quarters of their tokens  6" in printed[8]


def test_the_command_writes_text_if_it_has_the_tokenizer_of_the_trie(treepack: Run, tmp_path: Path) -> None:
    name = save(tmp_path / "tokenizer", PLAIN)
    lines = [{"id": f"c{i}", "prompt": "Add", "completion": f"two and {i} is", "reward": i} for i in range(2)]
    chat = write_lines(tmp_path / "chat.jsonl", lines)
    assert treepack("build-trie", chat, "--tokenizer", name, "--out", tmp_path / "trie").status == 0
    (rollout,) = (t for t in trajectories_of(read_trie(tmp_path / "trie")) if t.trajectory_id == "c1")
    assert isinstance(rollout.content, Tokens)
    entropies = np.arange(rollout.content.num_trained)[::-1]
    signals = write_lines(tmp_path / "signals.jsonl", [{"id": "c1", "entropies": entropies.tolist()}, {"id": "x"}])
    command = ("augment", tmp_path / "trie", "--signals", signals, "--out")
    done = treepack(*command, tmp_path / "text.jsonl", "--tokenizer", name)
    assert done.status == 0
    assert done.notes == f"note: 1 records of {signals} name rollouts that {tmp_path / 'trie'} lacks\n"
    assert done.out.splitlines()[:3] == [
        "trajectories                    2",
        "rollouts cut                    1",
        "rollouts not successful         1",
    ]
    assert "texts that encode to other ids  0" in done.out
    query = json.loads((tmp_path / "text.jsonl").read_text())
    first = int(rollout.content.starts[0])
    # Entropies descend, so the highest one in the window is its first, at ceil(T / 4).
    quarter = -(-rollout.content.num_trained // 4)
    assert query == {
        "query_id": query["query_id"],
        "group_id": query["query_id"],
        "parent_group": rollout.group_id,
        "parent_trajectory": "c1",
        "num_reused": quarter,
        "untrained_prefix": first + quarter,
        "prompt_token_ids": rollout.content.tokens[: first + quarter].tolist(),
        "text": query["text"],
    }
    assert "Addtwo and 1 is".startswith(query["text"].replace("\n", ""))
    assert len(query["text"]) > len("Add")
    plain_ids = treepack(*command, tmp_path / "ids.jsonl")
    assert "note: no --tokenizer, so text is null and queries are token ids only\n" in plain_ids.err
    assert json.loads((tmp_path / "ids.jsonl").read_text()) == {**query, "text": None}
    assert treepack(*command, tmp_path / "twin.jsonl").status == 0
    assert (tmp_path / "ids.jsonl").read_bytes() == (tmp_path / "twin.jsonl").read_bytes()
    other = save(tmp_path / "other", PLAIN, special=["<other>"])
    refused = treepack(*command, tmp_path / "new.jsonl", "--tokenizer", other)
    assert (refused.status, "is another tokenizer than" in refused.err) == (1, True)
    assert not (tmp_path / "new.jsonl").exists()


def test_the_command_says_in_one_sentence_what_it_cannot_do(treepack: Run, tmp_path: Path) -> None:
    first = write_lines(tmp_path / "first.jsonl", first_rollouts())
    trie, packed_rows = tmp_path / "trie", tmp_path / "packed"
    assert treepack("build-trie", first, "--out", trie).status == 0
    few = write_lines(tmp_path / "few.jsonl", first_rollouts()[:4])
    assert treepack("build-trie", few, "--out", tmp_path / "b").status == 0
    assert treepack("pack", trie, "--capacity", 64, "--out", packed_rows).status == 0
    signals = write_lines(tmp_path / "s.jsonl", [{"id": f"r{i}", "entropies": [0.5] * 12} for i in range(7)])
    calls: list[tuple[tuple[object, ...], str]] = [
        ((tmp_path / "nothing",), "nothing: no such directory; check the path"),
        ((trie,), "there are no entropies to cut by; pack the trie, run treepack logprobs --entropies and give"),
        ((trie, "--packed", packed_rows), "its rows have no term_entropy; run treepack logprobs --entropies on it"),
        ((tmp_path / "b", "--packed", packed_rows), "was packed from another trie than"),
        ((trie, "--packed", packed_rows, "--signals", signals), "and --signals both have entropies; give one of them"),
        ((trie, "--signals", signals), "r7: entropies are missing; run treepack logprobs --entropies"),
        ((packed_rows, "--signals", signals), "is packed already; give the trie that it was packed from"),
        ((trie, "--signals", tmp_path / "none"), "cannot be read (No such file or directory)"),
    ]
    for arguments, message in calls:
        done = treepack("augment", *arguments, "--out", tmp_path / "out.jsonl")
        assert (done.status, message in done.err, done.err.count("\n")) == (1, True, 1), (arguments, done.err)
        assert not (tmp_path / "out.jsonl").exists()
    for out, message in ((first, "exists; choose another --out or give --overwrite"), (trie / "x", "lies inside the")):
        done = treepack("augment", trie, "--signals", signals, "--out", out)
        assert (done.status, message in done.err) == (1, True)
    signals = write_lines(tmp_path / "all.jsonl", [{"id": f"r{i}", "entropies": [0.5] * 12} for i in range(8)])
    command = ("augment", trie, "--signals", signals, "--overwrite", "--out")
    refused = treepack(*command, first)
    assert (refused.status, "exists and was not written by treepack" in refused.err) == (1, True)
    assert [treepack(*command, tmp_path / "out.jsonl").status for _ in range(2)] == [0, 0]
