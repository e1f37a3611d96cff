"""`treepack rollout` samples from a server, and its file goes through the other commands.

The programs of docs/rollouts.md and docs/tree-rl.md sample from a model in this process.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.command_line import Result, Run
from support.engine_server import EngineServer, in_thread
from support.paths import ROOT
from treepack.files.manifest import read_manifest
from treepack.rollout.answers import answer_test, has_boxed

REWARDS = """
def even(text, fields, *, ids):
    return len(ids) % fields["divisor"] == 0

def broken(text, fields, *, ids):
    raise ValueError("no solution")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with two prompts, a reward function and the config of a model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.json").symlink_to(ROOT / "sample_data" / "tiny-qwen3.json")
    (tmp_path / "made_rewards.py").write_text(REWARDS)
    write("prompts.jsonl", *({"group_id": f"q{i}", "prompt_token_ids": [5, 6, 7 + i], "divisor": 2} for i in range(2)))
    return tmp_path


@pytest.fixture
def server() -> Iterator[str]:
    """The address of a server."""
    with in_thread(EngineServer()) as url:
        yield url


def write(name: str, *records: dict[str, Any]) -> None:
    Path(name).write_text("".join(json.dumps(record) + "\n" for record in records))


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


TREES = ("--sampler", "treepo", "--width", 6, "--segment", 5, "--step", 3, "--reward", "made_rewards:even")


def test_sampled_trees_are_built_credited_packed_and_continued(treepack: Run, folder: Path, server: str) -> None:
    def run(*arguments: object) -> None:
        done = treepack(*arguments)
        assert (done.status, done.notes) == (0, ""), done.err

    sample = ("--engine", server, "--max-tokens", 24, "--quiet")
    run("rollout", "prompts.jsonl", *sample, *TREES, "--out", "rollouts.jsonl")
    records = lines("rollouts.jsonl")
    assert [record["rollout_id"].rpartition("/")[0] for record in records].count("q0:step-3") == 6
    assert {record["reward"] for record in records} == {0.0, 1.0}
    run("build-trie", "rollouts.jsonl", "--out", "trie", "--quiet")
    run("advantages", "trie", "--estimator", "treepo", "--segment", "recorded", "--keep-equal", "--out", "credited")
    run("pack", "credited", "--capacity", 256, "--out", "packed", "--quiet")
    # Continue two prefixes: one at the start of a segment, and one inside of one.
    chosen = [record for record in records if len(record["segments"]) > 1 and record["segments"][1] + 1 < 24][:2]
    places = [(record, record["segments"][1] + shift) for shift, record in enumerate(chosen)]
    rows = [
        {
            "group_id": record["group_id"],
            "step": 3,
            "trajectory_id": record["rollout_id"],
            "num_tokens": size,
            "num_continuations": 2,
        }
        for record, size in places
    ]
    write("prefixes.jsonl", *rows)
    more = ("--sampler", "prefixes", "--trie", "trie", "--reward", "made_rewards:even", "--out", "more.jsonl")
    run("rollout", "prefixes.jsonl", *sample, *more)
    continued = lines("more.jsonl")
    assert len(continued) == 4
    for record, size in places:
        ids = (record["prompt_token_ids"] + record["response_ids"])[:size]
        same = [each for each in continued if each["parent_rollout"] == record["rollout_id"]]
        assert [(each["prompt_token_ids"], each["parent_tokens"]) for each in same] == [(ids, size)] * 2
    run("build-trie", "rollouts.jsonl", "more.jsonl", "--out", "whole", "--quiet")
    run("advantages", "whole", "--estimator", "treerpo", "--segment", "recorded", "--keep-equal", "--out", "second")


def test_a_given_template_is_named_for_the_next_command_which_keeps_it(
    treepack: Run, folder: Path, server: str
) -> None:
    Path("my template.jinja").write_text("{{ messages[0].content }}")
    command = ("rollout", "prompts.jsonl", "--engine", server, *TREES, "--max-tokens", 24, "--out")
    done = treepack(*command, "plain.jsonl")
    assert "template" not in done.err
    assert "saved against independent sampling, estimated" in done.out
    done = treepack(*command, "rollouts.jsonl", "--chat-template", "my template.jinja")
    assert (
        "note: token ids do not name my template.jinja; give --chat-template 'my template.jinja' to prepare" in done.err
    )
    following = shlex.split(done.err.splitlines()[-1])
    assert following[:3] == ["next:", "treepack", "prepare"]
    done = treepack(*following[2:-1], "data")
    assert done.status == 0, done.err
    assert read_manifest(Path("data/packed"))["chat_template"]["name"] == "my template.jinja"


def test_independent_rollouts_have_no_figures_about_shared_tokens(treepack: Run, folder: Path) -> None:
    done = treepack(
        *("rollout", "prompts.jsonl", "--engine", "model.json", "--stop-token-id", 2, "--sampler", "independent"),
        *("--width", 2, "--max-tokens", 4, "--out", "rollouts.jsonl"),
    )
    names = [line.split("  ")[0] for line in done.out.splitlines()]
    assert "mean tokens of a rollout" in names
    assert not {"tokens decoded per rollout", "saved against independent sampling, estimated"} & {*names}
    assert "in the engine's cache" not in names


def test_rollouts_of_a_server_are_repeatable_and_resumed(treepack: Run, folder: Path) -> None:
    with in_thread(EngineServer()) as url:
        command = ("rollout", "prompts.jsonl", "--engine", url, *TREES, "--max-tokens", 24, "--quiet", "--out")
        figures = treepack(*command, "rollouts.jsonl", "--json").json
        assert (figures["num_queries"], figures["num_rollouts"]) == (2, 12)
        length: Any = figures["length"]
        decoded: Any = figures["tokens_decoded"]
        assert figures["saved"] == pytest.approx(1 - decoded / (12 * length["before_fallback"]))
        before = Path("rollouts.jsonl").read_bytes()
        done = treepack(*command, "again.jsonl")
        assert [line.split("  ")[0] for line in done.out.splitlines()][:2] == ["queries", "rollouts"]
        assert sorted(lines("again.jsonl"), key=str) == sorted(lines("rollouts.jsonl"), key=str)
        assert treepack(*command, "rollouts.jsonl").err == (
            f"treepack: {folder}/rollouts.jsonl: exists; continue its run with --resume, or choose another --out\n"
        )
        again = treepack(*command, "rollouts.jsonl", "--resume", "--json").json
        assert (again["num_queries"], again["num_before"]) == (0, 2)
        other = treepack(*command, "rollouts.jsonl", "--resume", "--seed", 1)
        assert (other.status, "seed was 0 when its run started and is 1 now" in other.err) == (1, True)
    assert Path("rollouts.jsonl").read_bytes() == before
    assert treepack("build-trie", "rollouts.jsonl", "--out", "trie", "--quiet").status == 0


def test_a_server_that_fails_later_leaves_the_finished_trees(treepack: Run, folder: Path) -> None:
    def run(server: EngineServer, out: str, *more: str) -> Result:
        with in_thread(server) as url:
            trees = ("--engine", url, *TREES, "--queries", 1, "--max-tokens", 24, "--quiet", "--out", out, *more)
            return treepack("rollout", "prompts.jsonl", *trees)

    whole = EngineServer()
    assert run(whole, "whole.jsonl").status == 0
    # Every request succeeds except the last one, which belongs to the second tree.
    failed = run(EngineServer(statuses=[200] * (len(whole.requests) - 1) + [400]), "out.jsonl")
    assert failed.status == 1
    assert failed.err.endswith(f"; 1 of 2 trees are in {folder}/out.jsonl, continue with --resume\n")
    assert failed.err.count("\n") == 1
    # The server may have moved to another address in the meantime.
    assert run(EngineServer(), "out.jsonl", "--resume").status == 0
    assert lines("out.jsonl") == lines("whole.jsonl")


ENVIRONMENT = """
class Counting:
    \"\"\"Three turns; the observation is the length of the turn, and the reward the number of turns.\"\"\"

    def __init__(self, fields, tokenizer):
        self.fields, self.turns = fields, []

    def prompt(self):
        return [5, 6, self.fields["start"]]

    def observe(self, response_ids):
        self.turns.append(len(response_ids))
        return None if len(self.turns) == 3 else [60, min(len(response_ids), 63)]

    def reward(self):
        return len(self.turns)
"""


def test_an_environment_has_the_prompts_and_is_replayed_for_continuations(treepack: Run, folder: Path) -> None:
    (folder / "made_environment.py").write_text(ENVIRONMENT)
    write("tasks.jsonl", *({"task_id": f"t{i}", "start": 7 + i} for i in range(2)))
    with in_thread(EngineServer()) as url:
        world = ("--environment", "made_environment:Counting", "--max-tokens", 999, "--stop-token-id", 0)
        common = ("--engine", url, *world, "--quiet")
        turns = ("--sampler", "treepo", "--segment", "turn", "--width", 4, "--out", "rollouts.jsonl")
        assert treepack("rollout", "tasks.jsonl", *common, *turns).status == 0
        records = lines("rollouts.jsonl")
        assert {record["prompt_token_ids"][2] for record in records} == {7, 8}
        assert [record["reward"] for record in records] == [3.0] * 8
        assert treepack("rollout", "tasks.jsonl", *common, *turns, "--resume", "--json").json["num_before"] == 2
        assert treepack("build-trie", "rollouts.jsonl", "--out", "trie", "--quiet").status == 0
        # The first prefix ends with the observation of the first turn, the second one inside of the second turn.
        rows = [
            {
                "group_id": record["group_id"],
                "trajectory_id": record["rollout_id"],
                "num_tokens": record["segments"][1] + shift,
                "num_continuations": 2,
            }
            for shift, record in enumerate((records[0], records[-1]))
        ]
        write("prefixes.jsonl", *rows)
        more = ("--sampler", "prefixes", "--trie", "trie", "--out", "more.jsonl")
        done = treepack("rollout", "prefixes.jsonl", *common, *more)
        assert (done.status, done.notes) == (0, "")
    continued = lines("more.jsonl")
    assert [record["reward"] for record in continued] == [3.0] * 4
    for record in continued:
        (row,) = [row for row in rows if row["trajectory_id"] == record["parent_rollout"]]
        assert len(record["prompt_token_ids"]) == record["parent_tokens"] == row["num_tokens"]
        # Two further turns, with one observation between them.
        assert [record["response_ids"][i] for i, flag in enumerate(record["response_mask"]) if flag == 0][::2] == [60]


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (("--sampler", "independent", "--segment", 5), 2, "--segment is an option of --sampler treepo; leave it out"),
        (("--sampler", "treepo", "--environment", "a:b", "--reward", "a:b"), 2, "--environment gives the reward"),
        (("--sampler", "treepo", "--branching-temperature", "5-1"), 2, "over the depth of a tree; give --depth too"),
        (("--sampler", "treepo", "--first-forks", "8-2"), 2, "--first-forks is (8, 2); expected a number from 1 on"),
        (("--sampler", "treepo", "--first-forks", "many"), 2, "'many' is neither a number nor two numbers such as 2-8"),
        (("--sampler", "treepo", "--temperature", 0), 2, "--temperature is 0.0; expected a positive number"),
        (("--sampler", "treepo", "--out", "s3://bucket/a.jsonl"), 1, "which a store cannot do; give a file on this"),
        (("--sampler", "treepo", "--out", "."), 1, "is a directory; give the name of a file in it"),
        (("--sampler", "prefixes"), 1, "has plain prompts, and --sampler prefixes continues what treepack allocate"),
        (("--sampler", "treepo", "--answer", "boxed"), 1, "--answer is searched in text; give the model's --tokenizer"),
        (("--sampler", "treepo", "--reward", "made_rewards:none"), 1, "made_rewards has no none; it contains broken"),
        (("--sampler", "treepo", "--reward", "gone_rewards:x"), 1, "there is no module gone_rewards; run treepack in"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(
    treepack: Run, folder: Path, arguments: tuple[object, ...], status: int, sentence: str
) -> None:
    done = treepack("rollout", "prompts.jsonl", "--engine", "model.json", "--out", "out.jsonl", *arguments)
    assert done.status == status
    assert sentence in done.err
    assert status == 2 or done.err.count("\n") == 1
    assert not (folder / "out.jsonl").exists()


def test_an_unreachable_server_and_a_missing_key_are_one_sentence(treepack: Run, folder: Path) -> None:
    command = ("rollout", "prompts.jsonl", "--sampler", "independent", "--out", "out.jsonl", "--engine")
    done = treepack(*command, "http://127.0.0.1:9")
    assert (done.status, "http://127.0.0.1:9" in done.err, done.err.count("\n")) == (1, True, 1)
    done = treepack(*command, "http://127.0.0.1:9", "--api-key-env", "NO_SUCH_KEY_HERE")
    assert done.err == "treepack: --api-key-env NO_SUCH_KEY_HERE: this environment variable is not set; export it\n"


def test_another_tokenizer_than_the_model_has_is_refused(treepack: Run, folder: Path) -> None:
    model, other = folder / "model", folder / "other"
    for each in (model, other):
        shutil.copytree(ROOT / "sample_data" / "tokenizer", each)
    shutil.copyfile("model.json", model / "config.json")
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    vocabulary["model"]["merges"] = []
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    done = treepack(
        "rollout", "prompts.jsonl", "--engine", model, "--tokenizer", other, "--sampler", "treepo", "--out", "out.jsonl"
    )
    assert done.err == f"treepack: {other}: is another tokenizer than that of {model}; leave out --tokenizer\n"


def test_tables_have_their_own_numbers_of_rollouts(treepack: Run, folder: Path) -> None:
    write("roots.jsonl", {"group_id": "q0", "num_rollouts": 0})
    command = ("rollout", "roots.jsonl", "--engine", "model.json", "--out", "out.jsonl", "--prompts", "prompts.jsonl")
    done = treepack(*command, "--sampler", "independent")
    assert "asks for no rollout, because all its numbers are 0; allocate a larger budget" in done.err
    write("roots.jsonl", {"group_id": "q0", "num_rollouts": 3})
    done = treepack(*command, "--sampler", "independent", "--width", 4)
    assert (done.status, "has the numbers of rollouts; leave out --width" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("text", "closed"),
    [
        (r"so \boxed{42}", True),
        (r"so \boxed{\frac{1}{2}}", True),
        (r"so \boxed{\frac{1}{2}", False),
        (r"\boxed{ and \boxed{1}", True),
        (r"\boxed", False),
        ("{}", False),
    ],
)
def test_a_boxed_answer_is_closed_if_its_braces_are_balanced(text: str, closed: bool) -> None:
    assert has_boxed(text) is closed


def test_an_answer_is_searched_in_the_text_of_the_ids() -> None:
    from treepack.tokenise.encoder import Encoder
    from treepack.tokenise.tokenization import read_tokenizer

    tokenizer = read_tokenizer(str(ROOT / "sample_data" / "tokenizer"))
    found, ids = answer_test(r"two b\w+hes", tokenizer), Encoder(tokenizer).encode("with two branches, Quay Street")
    assert found(ids)
    assert not found(ids[:2])
    assert not found(np.zeros(0, np.int32))


def test_a_reward_that_raises_names_the_function_and_the_record(treepack: Run, folder: Path, server: str) -> None:
    arguments = ("--sampler", "independent", "--width", 2, "--reward", "made_rewards:broken", "--out", "out.jsonl")
    done = treepack("rollout", "prompts.jsonl", "--engine", server, "--max-tokens", 24, "--quiet", *arguments)
    assert done.status == 1
    for part in ("prompts.jsonl:", "made_rewards:broken", "ValueError: no solution", "no tree was finished"):
        assert part in done.err
