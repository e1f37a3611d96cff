"""Tokenised records: every name, every length, and every contradiction that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from support.read_rollouts import read_trajectories
from support.readings import only, read_as, refusal_as, tokens_of
from support.refusal import refusal
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.fields.token_fields import KINDS, NAMES
from treepack.ingest.readers.tokens.token_records import read_tokens
from treepack.trajectory import Skipped, Tokens, Trajectory, positions

IDS = [5, 6, 7, 8]
PAIR = {"prompt_ids": [5, 6], "response_ids": [7, 8]}
MASKED = {"input_ids": IDS, "loss_mask": [0, 1, 0, 1]}


def read(value: dict[str, Any], **options: Any) -> Trajectory:
    return only(read_as("tokens", value, **options))


def content(value: dict[str, Any], **options: Any) -> Tokens:
    return tokens_of(read(value, **options))


def trained(value: dict[str, Any], **options: Any) -> list[int]:
    result = content(value, **options)
    return list(positions(result.starts, result.ends).tolist())


@st.composite
def records(draw: st.DrawFn) -> tuple[list[int], int, list[int]]:
    """Ids, the length of the prompt, and a mask over all of them that trains a token other than the first."""
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=12))
    mask = draw(st.lists(st.sampled_from([0, 1]), min_size=len(ids), max_size=len(ids)))
    mask[draw(st.integers(1, len(ids) - 1))] = 1
    return ids, draw(st.integers(0, len(ids))), mask


@given(records(), st.sampled_from(NAMES["ids"]), st.sampled_from(NAMES["mask"]), st.sampled_from([int, bool, float]))
def test_a_mask_over_all_tokens_trains_what_it_marks(
    record: tuple[list[int], int, list[int]], name: str, mask_name: str, kind: type
) -> None:
    ids, _, mask = record
    result = content({name: ids, mask_name: [kind(flag) for flag in mask]})
    assert result.tokens.tolist() == ids
    assert result.tokens.dtype == np.int32
    assert positions(result.starts, result.ends).tolist() == [i for i, flag in enumerate(mask) if flag and i > 0]
    assert result.span_weights.tolist() == [1.0] * len(result.starts)
    assert (result.starts[1:] > result.ends[:-1]).all()


@given(records(), st.sampled_from(NAMES["prompt"]), st.sampled_from(NAMES["response"]), st.booleans())
def test_a_pair_is_joined_and_its_mask_may_cover_the_response_only(
    record: tuple[list[int], int, list[int]], prompt: str, response: str, whole: bool
) -> None:
    ids, start, mask = record
    mask = [flag if i >= start else 0 for i, flag in enumerate(mask)]
    value = {prompt: ids[:start], response: ids[start:], "response_mask": mask if whole else mask[start:]}
    expected = [i for i, flag in enumerate(mask) if flag and i > 0]
    assume(expected)
    assert trained(value) == expected
    assert trained({"tokens": ids, "response_length": len(ids) - start, "loss_mask": mask[start:]}) == expected


@given(records(), st.integers(0, 3), st.integers(0, 3))
def test_padding_changes_nothing(record: tuple[list[int], int, list[int]], left: int, right: int) -> None:
    ids, _, mask = record
    logprobs = [-float(i) for i in range(len(ids))]
    plain = read({"input_ids": ids, "loss_mask": mask, "logprobs": logprobs, "ref_logprobs": logprobs})
    padded = read(
        {
            "input_ids": [0] * left + ids + [0] * right,
            "attention_mask": [0] * left + [1] * len(ids) + [0] * right,
            "loss_mask": [1] * left + mask + [0] * right,
            "logprobs": [0.0] * left + logprobs + [0.0] * right,
            "ref_logprobs": [logprob for logprob, flag in zip(logprobs, mask, strict=True) if flag],
            "position_ids": [0] * left + list(range(len(ids) + right)),
        }
    )
    for name in ("tokens", "starts", "ends", "span_weights", "sampling_logprob", "ref_logprob"):
        np.testing.assert_array_equal(getattr(plain.content, name), getattr(padded.content, name))
    notes = ["left padding removed"] * (left > 0) + ["right padding removed"] * (right > 0)
    assert padded.notes[: len(notes)] == tuple(notes)
    assert padded.notes[len(notes) :] == plain.notes


@given(records(), st.sampled_from(["whole", "response", "trained"]))
def test_values_over_all_the_response_or_the_trained_tokens_land_on_the_same_tokens(
    record: tuple[list[int], int, list[int]], reading: str
) -> None:
    ids, start, mask = record
    mask = [flag if i >= start else 0 for i, flag in enumerate(mask)]
    chosen = [i for i, flag in enumerate(mask) if flag]
    assume(any(i > 0 for i in chosen))  # nothing trains the first token
    given_values = {
        "whole": [-float(i) if flag else None for i, flag in enumerate(mask)],
        "response": [-float(i) if mask[i] else float("nan") for i in range(start, len(ids))],
        "trained": [-float(i) for i in chosen],
    }[reading]
    value = {"prompt_ids": ids[:start], "response_ids": ids[start:], "response_mask": mask[start:]}
    for kind, attribute in (
        ("sampling log-probabilities", "sampling_logprob"),
        ("old log-probabilities", "old_logprob"),
        ("reference log-probabilities", "ref_logprob"),
        ("advantages", "advantage"),
    ):
        for name in NAMES[kind]:
            result = getattr(content(value | {name: given_values}), attribute)
            assert result.tolist() == [-float(i) for i in chosen if i > 0]
            assert result.dtype == (np.float64 if kind == "advantages" else np.float32)


def test_the_names_of_python_are_names_in_records() -> None:
    names = {name for kind in NAMES.values() for name in kind}
    assert {"sampling_logprobs", "old_logprobs", "ref_logprobs", "teacher_logprobs", "advantages"} <= names


@given(records())
def test_parquet_and_jsonl_read_the_same(
    tmp_path_factory: pytest.TempPathFactory, record: tuple[list[int], int, list[int]]
) -> None:
    ids, _, mask = record
    folder = tmp_path_factory.mktemp("both")
    value = {"input_ids": ids, "loss_mask": mask, "logprobs": [-1.5] * len(ids), "reward": 0.5, "uid": "g", "step": 3}
    (folder / "r.jsonl").write_text(json.dumps(value))
    pq.write_table(pa.table({name: [item] for name, item in value.items()}), folder / "r.parquet")
    both = list(read_trajectories([folder]))
    for trajectory in both:
        assert isinstance(trajectory, Trajectory)
        assert (trajectory.group_id, trajectory.step, trajectory.reward) == ("g", 3, 0.5)
    for name in ("tokens", "starts", "ends", "span_weights", "sampling_logprob"):
        first, second = (getattr(trajectory.content, name) for trajectory in both)  # type: ignore[union-attr]
        np.testing.assert_array_equal(first, second)


def test_a_table_of_an_unknown_layout_with_arrays_is_refused(tmp_path: Path) -> None:
    # A column of numbers is an array, and not a list of texts that could be answers.
    table = pa.table({"question": ["How many bolts are in the box?"], "logits": [[0.25, 0.5]]})
    pq.write_table(table, tmp_path / "r.parquet")
    assert refusal(list, read_trajectories([tmp_path / "r.parquet"])).startswith(
        f"{tmp_path}/r.parquet[0]: has no known format, but the fields question, logits; "
    )


def test_every_name_has_one_kind() -> None:
    assert len(KINDS) == sum(len(names) for names in NAMES.values())


def test_the_trained_tokens_are_those_of_all_masks() -> None:
    value = {**PAIR, "response_mask": [1, 1], "tool_mask": [1, 0], "loss_mask": [0, 1, 1, 1]}
    assert trained(value) == [2]
    labels = {"input_ids": IDS, "labels": [-100, 6, 7, -100]}
    assert trained(labels) == [1, 2]
    assert trained(labels | {"assistant_masks": [0, 1, 0, 1]}) == [1]
    assert trained(PAIR | {"labels": [-100, 8]}) == [3]


def test_without_a_mask_the_response_is_trained() -> None:
    assert trained(PAIR) == [2, 3]
    assert trained({"tokens": IDS, "response_length": 1}) == [3]
    assert trained({"input_ids": IDS, "responses": [8]}) == [3]
    assert trained({"input_ids": IDS, "prompts": [5]}) == [1, 2, 3]


def test_all_tokens_are_trained_only_if_asked_for() -> None:
    trajectory = read({"input_ids": IDS}, train_all=True)
    assert (trained({"input_ids": IDS}, train_all=True), trajectory.notes) == ([1, 2, 3], ())
    assert refusal_as("tokens", {"input_ids": IDS}) == (
        "marks neither the trained tokens nor the start of the response; "
        "give loss_mask or response_length, or train all tokens with --train-all"
    )


def test_a_prompt_mask_of_zeros_then_ones_is_padding_and_of_one_kind_means_nothing() -> None:
    assert content(PAIR | {"prompt_mask": [0, 1]}).tokens.tolist() == [6, 7, 8]
    for mask in ([0, 0], [1, 1]):
        assert content(PAIR | {"prompt_mask": mask}).tokens.tolist() == IDS
    padded = PAIR | {"attention_mask": [0, 1, 1, 0], "prompt_mask": [1, 1], "rollout_log_probs": [-1.0, 0.0]}
    assert content(padded).tokens.tolist() == [6, 7]
    assert trained(padded) == [1]


def test_padding_that_no_attention_mask_names_stays_as_untrained_tokens() -> None:
    for name in ("completion_ids", "response_ids"):
        trajectory = read({"prompt_ids": [5], name: [6, 7, 0, 0], "completion_mask": [1, 1, 0, 0]})
        assert isinstance(trajectory.content, Tokens)
        assert trajectory.content.tokens.tolist() == [5, 6, 7, 0, 0]
        assert positions(trajectory.content.starts, trajectory.content.ends).tolist() == [1, 2]
        assert trajectory.notes == ()


def test_advantages_may_be_one_number() -> None:
    for value in ({"advantage": 2}, {"advantages": 2}, {"advantage": 2, "advantages": [0, 2, 0, 2]}):
        trajectory = read(MASKED | value)
        assert (trajectory.advantage, tokens_of(trajectory).advantage) == (2.0, None)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"input_ids": []}, "empty trajectory"),
        ({"prompt_ids": [], "response_ids": []}, "empty trajectory"),
        ({"input_ids": IDS, "attention_mask": [0] * 4}, "empty trajectory"),
        ({"input_ids": IDS, "loss_mask": [0] * 4}, "no trained token"),
        ({"input_ids": IDS, "loss_mask": [1, 0, 0, 0]}, "no trained token"),
        ({"input_ids": [5], "loss_mask": [1]}, "no trained token"),
        ({"prompt_ids": IDS, "response_ids": []}, "no trained token"),
    ],
)
def test_what_cannot_be_trained_on_is_skipped(value: dict[str, Any], reason: str) -> None:
    assert list(read_tokens(Record("r:1", "r", value), ReadOptions())) == [Skipped("r:1", reason)]


NOT_IDS = "input_ids is not a flat list of integers; expected token ids"
LENGTHS = "expected 4 (the whole sequence) or 2 (the response)"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        # ids
        ({"input_ids": [1, 2.5]}, NOT_IDS),
        ({"input_ids": [True, False]}, NOT_IDS),
        ({"input_ids": [1, 7, True]}, NOT_IDS),
        ({"input_ids": [[1, 2], [3]]}, NOT_IDS),
        ({"input_ids": np.array([1.0, 2.0])}, NOT_IDS),
        ({"input_ids": [1, -2]}, "input_ids holds the id -2; expected token ids in [0, 2147483647]"),
        ({"input_ids": [1, 2**31]}, "input_ids holds the id 2147483648; expected token ids in [0, 2147483647]"),
        ({"input_ids": [1], "tokens": [2]}, "input_ids and tokens differ; drop the wrong one"),
        (PAIR | {"input_ids": [5, 6, 7, 9]}, "input_ids does not end with response_ids; drop the wrong one"),
        (PAIR | {"input_ids": [4, 6, 7, 8]}, "input_ids does not begin with prompt_ids; drop the wrong one"),
        (
            {"prompt_ids": [1], "x": 1},
            "has the fields prompt_ids, x; expected input_ids, or prompt_ids and response_ids",
        ),
        # masks
        (
            {"input_ids": IDS, "loss_mask": [1, 1]},
            "loss_mask has 2 values for 4 tokens; give response_length if it covers the response only",
        ),
        (PAIR | {"response_mask": [1, 1, 1]}, f"response_mask has 3 values; {LENGTHS}"),
        ({"input_ids": IDS, "mask": [0, 1, 2, 0]}, "mask has the value 2; expected 0 and 1"),
        ({"input_ids": IDS, "mask": [0, 1, -1, 0]}, "mask has the value -1; expected 0 and 1"),
        ({"input_ids": IDS, "mask": [0, 0.5, 1, 0]}, "mask has values from 0.0 to 1.0; expected 0 and 1"),
        (
            {"input_ids": IDS, "loss_mask": [0, -0.5, 1, 0]},
            "loss_mask has the value -0.5; expected each value to be 0 or a number in [1e-12, 1e+12]",
        ),
        (
            {"input_ids": IDS, "loss_mask": [0, 1e-320, 1, 0]},
            "loss_mask has the value 1e-320; expected each value to be 0 or a number in [1e-12, 1e+12]",
        ),
        (
            {"input_ids": IDS, "loss_mask": [0, 0.5, 1e31, float("nan")]},
            "loss_mask has the value 1e+31; expected each value to be 0 or a number in [1e-12, 1e+12]",
        ),
        ({"input_ids": IDS, "mask": [[0, 1], [1]]}, "mask is not a flat list of 0 and 1; expected one per token"),
        (
            {"input_ids": IDS, "mask": ["0", "1", "1", "1"]},
            "mask is not a flat list of 0 and 1; expected one per token",
        ),
        # labels
        (
            {"input_ids": IDS, "labels": [-100, 7, 8, -100]},
            "labels differ from the token ids at token 1; "
            "expected unshifted labels, each the id at its own position or -100",
        ),
        (
            {"input_ids": IDS, "labels": [-100, 6.0, 7.0, 8.0]},
            "labels is not a flat list of integers; expected token ids or -100",
        ),
        # padding and positions
        (
            {"input_ids": IDS, "attention_mask": [1, 0, 1, 1]},
            "attention_mask has holes; expected one run of ones with padding left and right of it",
        ),
        ({"input_ids": IDS, "attention_mask": [1, 1]}, "attention_mask has 2 values; expected 4, one per token"),
        (
            PAIR | {"prompt_mask": [1, 0]},
            "prompt_mask is not zeros then ones; expected the padding left of the prompt",
        ),
        (
            MASKED | {"position_ids": [0, 1, 0, 1]},
            "position_ids is not 0, 1, 2, ...; give one sequence per record, with plain positions",
        ),
        (
            MASKED | {"position_ids": [[0, 1, 2, 3]] * 3},
            "position_ids is not 0, 1, 2, ...; give one sequence per record, with plain positions",
        ),
        (MASKED | {"seq_lengths": [2, 2]}, "seq_lengths has 2 lengths; give one sequence per record"),
        ({"tokens": IDS, "response_length": 5}, "response_length is 5; expected 0 to 4, the number of tokens"),
        ({"tokens": IDS, "response_length": 1.5}, "response_length is 1.5; expected the number of tokens"),
        (PAIR | {"response_length": 3}, "response_length is 3, but the response has 2 tokens; drop one"),
        # log-probabilities and advantages
        (
            MASKED | {"logprobs": [-1.0] * 3},
            "logprobs has 3 values; expected 4 (the whole sequence), or 2 (the trained tokens)",
        ),
        (
            PAIR | {"response_mask": [1, 0], "logprobs": [-1.0] * 3},
            "logprobs has 3 values; expected 4 (the whole sequence), 2 (the response), or 1 (the trained tokens)",
        ),
        (
            PAIR | {"loss_mask": [0, 1, 0, 1], "logprobs": [-1.0, -2.0]},
            "logprobs has 2 values, as many as the response and as the trained tokens, which differ; "
            "give one per token of the whole sequence",
        ),
        (
            PAIR | {"loss_mask": [0, 1, 1, 1], "logprobs": [-1.0, -2.0]},
            "logprobs covers the response only, but tokens outside it are trained",
        ),
        (
            MASKED | {"advantages": [0, 0, 0, float("inf")]},
            "advantages is inf at trained token 1; expected finite numbers there",
        ),
        (
            MASKED | {"ref_logprobs": [0, -1, 0, 0.5]},
            "ref_logprobs is 0.5 at trained token 1, and no log-probability is above 0; write the natural "
            "logarithms of the probabilities",
        ),
        (MASKED | {"logprobs": [-1e39, 0]}, "logprobs is -inf at trained token 0; expected finite numbers there"),
        (MASKED | {"logprobs": ["-1", "-2"]}, "logprobs is not a flat list of numbers; expected one per token"),
        (
            MASKED | {"logprobs": [0, 0, 10**400, 1]},
            "logprobs has a number that does not fit a float; expected finite numbers",
        ),
        (
            MASKED | {"advantage": 1, "advantages": float("nan")},
            "advantages is nan; expected a finite number",
        ),
        (MASKED | {"advantage": float("nan")}, "advantage is nan; expected a finite number"),
        (
            MASKED | {"advantage": float("nan"), "advantages": [1, 2]},
            "advantage is nan; expected a finite number",
        ),
        (MASKED | {"logprobs": [True, True]}, "logprobs is not a flat list of numbers; expected one per token"),
        (
            MASKED | {"logprobs": [-1, -2], "inference_logprobs": [-1, -3]},
            "logprobs and inference_logprobs differ; drop the wrong one",
        ),
        (MASKED | {"advantage": 1, "advantages": [1, 2]}, "advantage and advantages differ; drop the wrong one"),
        (MASKED | {"advantage": 1, "advantages": 2}, "advantage and advantages differ; drop the wrong one"),
    ],
)
def test_a_bad_record_is_refused_in_one_sentence(value: dict[str, Any], expected: str) -> None:
    assert refusal_as("tokens", value) == expected


@pytest.mark.parametrize("value", [{"old_log_probs": [0, float("nan"), 0, -1]}, {"logprobs": [None, None]}])
def test_a_null_log_probability_of_a_trained_token_skips_its_rollout(value: dict[str, Any]) -> None:
    (item,) = read_as("tokens", MASKED | value)
    assert isinstance(item, Skipped)
    assert item.detail.endswith(f"{next(iter(value))} is nan at trained token 0; expected finite numbers there")


def test_ids_are_checked_against_the_vocabulary_behind_the_padding() -> None:
    assert refusal_as("tokens", MASKED, vocab_size=8) == "has the token id 8; expected ids below the vocabulary size 8"
    assert trained(MASKED, vocab_size=9) == [1, 3]
    padded = {"input_ids": [99, 1, 2], "attention_mask": [0, 1, 1], "loss_mask": [0, 0, 1]}
    assert trained(padded, vocab_size=3) == [1]
