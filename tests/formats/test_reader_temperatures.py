"""The sampler's temperature: every format that records it keeps it with the tokens that were sampled at it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.paths import ROLLOUTS
from support.read_rollouts import read_trajectories
from support.readings import only
from support.tempered import token_temperatures
from treepack.calls.chat_calls import ChatCall, read_chats
from treepack.calls.token_calls import TokenCall, read_calls
from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.trajectory import Chat, Tokens, Trajectory


def temperatures(item: Trajectory) -> set[str]:
    """The temperatures of the trained tokens or messages, as text, because NaN is not equal to itself."""
    if isinstance(item.content, Tokens):
        return {f"{value:g}" for value in token_temperatures(item).tolist()}
    assert isinstance(item.content, Chat)
    known = item.content.message_temperatures or [item.temperature] * len(item.content.messages)
    weights = item.content.message_weights
    return {"nan" if t is None else f"{t:g}" for t, weight in zip(known, weights, strict=True) if weight}


def read(path: Path, **options: Any) -> list[Trajectory]:
    items = read_trajectories([path], **options)
    return [item for item in items if isinstance(item, Trajectory)]


def read_record(value: dict[str, Any], tmp_path: Path, name: str = "r.jsonl") -> Trajectory:
    path = tmp_path / name
    path.write_text(json.dumps(value) + "\n")
    (item,) = read(path)
    return item


def test_formats_without_a_temperature_in_their_sample_get_none() -> None:
    items = [item for name in ("tinker.jsonl", "slime.json", "skyrl") for item in read(ROLLOUTS / name)]
    assert len(items) > 5
    assert set().union(*map(temperatures, items)) == {"nan"}


IDS: dict[str, Any] = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]}


@pytest.mark.parametrize("values", [[9.0, 0.5, 0.5, 1.0], [0.5, 0.5, 1.0]])
def test_temperatures_have_one_value_per_token_or_trained_token(values: list[float], tmp_path: Path) -> None:
    item = read_record(IDS | {"temperatures": values}, tmp_path)
    assert token_temperatures(item).tolist() == [0.5, 0.5, 1.0]


@pytest.mark.parametrize("name", ["sampling_params", "sampling_args"])
def test_the_settings_of_a_sampler_have_the_temperature(name: str, tmp_path: Path) -> None:
    item = read_record(IDS | {name: {"temperature": 0.7, "top_p": 0.9}}, tmp_path)
    assert item.temperature == 0.7


@pytest.mark.parametrize(
    "bad",
    [{"temperature": -1}, {"temperature": 1e39}, {"temperature": float("nan")}, {"temperatures": [1.0, -0.5, 1.0]}],
)
def test_an_impossible_temperature_is_refused(bad: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(TreepackError, match=r"r.jsonl:1: (a )?temperature is .*; expected a finite number"):
        read_record(IDS | bad, tmp_path)


def test_verl_batches_have_the_temperature_in_meta_info_or_per_sample(tmp_path: Path) -> None:
    batch = {"prompts": [[5, 6], [5, 6]], "responses": [[7, 8], [7, 9]]}
    value = {"batch": batch, "meta_info": {"temperature": 0.7}}
    path = tmp_path / "batch.json"
    path.write_text(json.dumps(value))
    assert [item.temperature for item in read(path)] == [0.7, 0.7]
    path.write_text(json.dumps(value | {"non_tensor_batch": {"temperature": [0.5, 1.0]}}))
    assert [item.temperature for item in read(path)] == [0.5, 1.0]


def test_verifiers_has_the_temperature_of_the_agent_and_of_a_call(tmp_path: Path) -> None:
    value = json.loads((ROLLOUTS / "verifiers.jsonl").read_text().splitlines()[0])
    trace = value["traces"][0]
    trace["agent"]["config"]["sampling"] = {"temperature": 0.7}
    trace["calls"][0]["sampling"] = {"temperature": 0.25}
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps(value) + "\n")
    first = read(path)[0]
    assert isinstance(first.content, Tokens)
    # The first call of the trace sampled node 2, the first three trained tokens.
    assert token_temperatures(first).tolist() == np.array([0.25] * 3 + [0.7] * 3, np.float32).tolist()


def test_swe_agent_has_the_temperature_in_its_replay_configuration(tmp_path: Path) -> None:
    (source,) = sorted((ROLLOUTS / "swe-agent").rglob("*.traj"))[:1]
    config = json.dumps({"agent": {"model": {"temperature": 0.25}}})
    path = tmp_path / source.name
    path.write_text(json.dumps(json.loads(source.read_text()) | {"replay_config": config}))
    assert set().union(*map(temperatures, read(path))) == {"0.25"}


def record() -> Record:
    return Record("r.jsonl:1", "r.jsonl", {"rollout_id": "a"})


def test_joined_calls_keep_the_temperature_of_each_turn_and_nan_for_an_unknown_one() -> None:
    calls = [
        TokenCall([1, 2], [3, 4], {"temperatures": 0.5}),
        TokenCall([1, 2, 3, 4, 5], [6], {"temperatures": 1.0}),
        TokenCall([1, 2, 3, 4, 5, 6], [7], {"temperatures": None}),
    ]
    item = only(read_calls(record(), calls, ReadOptions()))
    np.testing.assert_equal(token_temperatures(item), np.array([0.5, 0.5, 1.0, np.nan], np.float32))


def conversation() -> list[ChatCall]:
    user, first = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    more, second = {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "Ciao"}
    return [
        ChatCall([user], [first], temperature=0.5),
        ChatCall([user, first, more], [second], temperature=1.0),
    ]


def test_an_impossible_temperature_of_a_call_names_the_call() -> None:
    calls = [*conversation()[:1], ChatCall([], [{"role": "assistant", "content": "x"}], temperature=-1.0)]
    with pytest.raises(TreepackError, match=r"r.jsonl:1: call 2: temperature is -1.0; expected a finite number"):
        list(read_chats(record(), calls, ReadOptions()))
