"""Lists of numbers are cut out of lines of JSON without any change of what is read, refused or said."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from support.damage import damaged, samples
from treepack.errors import TreepackError
from treepack.files.input_files.limits import RecordLimits
from treepack.files.input_files.number_lists import LineParser, cut_numbers
from treepack.files.input_files.records import LineBlock
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.format import Format
from treepack.ingest.readers.registry import all_formats
from treepack.native.library import is_compiled
from treepack.ragged import RaggedArray
from treepack.trajectory import PromptCompletion, Skipped, Tokens, Trajectory

NAMES = ["input_ids", "loss_mask", "m"]
FAST = [each for each in all_formats() if each.arrays]

INTEGERS = "0 1 7 42 9999999 12345678 123456789 2147483647 -1 -100 -2147483648".split()
FLOATS = """0.0 -0.0 0.5 -1.25 -0.0001 1e-7 -1.1920928955078125e-07 2.5E-3 12.5e1 0e5 -0e0 1.0e+1 0.1 5.0 1e-27
    9007199254740993.0 0.30000000000000004 -0.69314718055994530942 1.7976931348623157e308""".split()
# Numbers beyond the limits of the loop, and values that are no number, or no JSON.
ODD = [
    *"2147483648 -2147483649 -0 007 00 1e3 NaN true null 99999999999999999999 12345678901 - 9007199254740992".split(),
    *"1e-28 1e400 1e-400 0.00000000000000000000000000001 12345678901234567890.5 1e00005 1.e5 1e 1e+ 0e99999".split(),
    *('"a" [1] {} / : 1:2 \\ +1 1_0 0x1 .5 1. ] }'.split()),
    *("", "1 2", "\xe9"),
]
SPACES = ["", "", " ", "  ", "\t", "\r", " \t "]
VALUES = """1 -5 1.5 null true NaN "x" "\\"" "\\\\" "\\\\\\"" "[1,2]" "input_ids\\":[1,2]" "]" "}" "\\ud83d" {} []
    [1.5,2] [true] {"input_ids":[1,2]} [{"m":[3]}] [[1],[2]] {"a":{"m":"]"},"b":[]}""".split()
KEYS = [*NAMES, *NAMES, "a", "b", "", "input_ids ", "Input_ids", "input\\u005fids", '\\"m', "m\\\\"]


def made_integer(rng: random.Random) -> str:
    return rng.choice([*INTEGERS, str(rng.randrange(10 ** rng.randint(1, 7)))])


def made_float(rng: random.Random) -> str:
    """A float as programs print them, and hard ones: halfway between two doubles, or with many digits."""
    digits = rng.choice([rng.getrandbits(54) | 1 << 53, rng.randrange(10 ** rng.randint(1, 19))])
    return rng.choice(
        [
            rng.choice(FLOATS),
            repr(-rng.expovariate(1)),
            repr(rng.uniform(-1, 1) * 10 ** -rng.randint(0, 12)),
            f"{rng.choice(['', '-'])}{digits}.0",
            f"{digits}e-{rng.randint(0, 28)}",
            f"0.{digits:0{rng.randint(1, 28)}}",
            made_integer(rng),
        ]
    )


def made_list(rng: random.Random) -> str:
    share = rng.choice([0, 0, 0, 0.02, 0.5])
    plain = made_float if rng.random() < 0.3 else made_integer
    numbers = [rng.choice(ODD) if rng.random() < share else plain(rng) for _ in range(rng.choice([0, 1, 1, 2, 3, 20]))]
    if rng.random() < 0.4:
        numbers = [f"{rng.choice(SPACES)}{number}{rng.choice(SPACES)}" for number in numbers]
    return f"[{rng.choice([',', ', ']).join(numbers)}]"


def made_line(rng: random.Random) -> bytes:
    """A line that is mostly an object with lists of integers, and sometimes damaged."""
    keys = [rng.choice(KEYS) for _ in range(4)] if rng.random() < 0.2 else rng.sample([*NAMES, "a", "b"], 3)
    fields = []
    for key in keys:
        value = made_list(rng) if rng.random() < 0.7 else rng.choice(VALUES)
        before, after, last = (rng.choice(SPACES) if rng.random() < 0.2 else "" for _ in range(3))
        fields.append(f'{before}"{key}"{after}:{last}{value}')
    end = rng.choice(["\n", "\n", "\r\n", "", " \n", "x\n", "{}\n"])
    line = bytearray(("{" + ",".join(fields) + "}" + end).encode())
    for _ in range(rng.choice([0, 0, 0, 0, 1, 2])):
        start = rng.randrange(len(line))
        end_of_damage = start + rng.randint(0, 3)
        line[start:end_of_damage] = rng.choice(
            [b'"', b"\\", b"[", b"]", b"{", b"}", b",", b":", b"\xff", b"-", b"", b"0"]
        )
    return b"\xef\xbb\xbf" * (rng.random() < 0.02) + b" " * rng.choice([0, 0, 0, 1]) + bytes(line)


def lines(seed: int, number: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    return (made_line(rng) for _ in range(number))


def cut(function: Callable[..., int], line: bytes) -> tuple[list[tuple[str, str]], bytes] | None:
    """The lists, each as its name and its numbers, and the rest; None if the line is left to the JSON parser."""
    names = np.frombuffer("".join(f"{name}\0" for name in NAMES).encode(), np.uint8)
    numbers = np.empty(len(line) // 2 + 1, np.int32), np.empty(len(line) // 2 + 1, np.float64)
    lists, rest = np.empty((len(NAMES) + 1, 4), np.int64), np.empty(len(line), np.uint8)
    size = function(np.frombuffer(line, np.uint8), names, *numbers, lists, rest)
    if size < 0:
        return None
    rows = lists[: lists[:, 0].tolist().index(-1)].tolist()
    # As text, which separates 0.0 and -0.0.
    return [(NAMES[name], repr(numbers[kind][start:end].tolist())) for name, kind, start, end in rows], rest[
        :size
    ].tobytes()


def outcome(parse: Callable[[bytes], Any], line: bytes) -> str:
    """The value or the error of a line, as text that separates 1, 1.0 and True, and the orders of fields."""
    try:
        return repr(parse(line))
    except orjson.JSONDecodeError as error:
        return f"{error}"


def test_lists_of_known_fields_are_cut_out() -> None:
    line = b'{"input_ids": [5, -6], "a": [7], "m":[0,1,0.5], "loss_mask": [true]}\n'
    rest = b'{"input_ids": 0, "a": [7], "m":0, "loss_mask": [true]}\n'
    lists = [("input_ids", "[5, -6]"), ("m", "[0.0, 1.0, 0.5]")]
    assert cut(cut_numbers.twin, line) == (lists, rest)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "line",
    [
        b'{"m": [1], "m": [2]}',
        b'{"m": [1], "m": 0}',
        b'{"m": [1], "\\u006d": 0}',
        b'[{"m": [1]}]',
        b'\xef\xbb\xbf{"m": [1]}',
        b'{"m": [1]',
        b"{}",
        b"",
    ],
)
def test_lines_with_ambiguous_fields_are_left_to_the_parser(line: bytes) -> None:
    assert cut(cut_numbers.twin, line) is None  # type: ignore[attr-defined]


def test_the_loop_in_c_equals_its_twin() -> None:
    assert is_compiled()
    num_lists = 0
    for line in lines(1, 2000):
        expected = cut(cut_numbers.twin, line)  # type: ignore[attr-defined]
        assert cut(cut_numbers, line) == expected, line
        num_lists += len(expected[0]) if expected else 0
    assert num_lists > 800


def test_a_line_has_the_value_or_the_error_of_the_json_parser() -> None:
    parser, num_arrays = LineParser(NAMES), 0

    def parse(line: bytes) -> Any:
        nonlocal num_arrays
        value, has_arrays = parser.parse(line)
        num_arrays += has_arrays
        return with_lists(value)

    for line in lines(2, 5000):
        assert outcome(parse, line) == outcome(lambda line: with_lists(orjson.loads(line)), line), line
    assert num_arrays > 900


def with_lists(value: Any) -> Any:
    """A value with lists in place of arrays, whose numbers are all floats if one is."""
    if not isinstance(value, dict):
        return value
    return {name: field.tolist() if isinstance(field, np.ndarray) else unmixed(field) for name, field in value.items()}


def unmixed(field: Any) -> Any:
    is_mixed = isinstance(field, list) and {type(each) for each in field} == {int, float}
    return list(map(float, field)) if is_mixed else field


def test_arrays_do_not_share_memory_with_later_lines() -> None:
    parser = LineParser(NAMES)
    (first, is_first), (second, is_second) = (parser.parse(b'{"m": [%d, 2, 3]}' % number) for number in (1, 9))
    assert (is_first, is_second) == (True, True)
    assert (first["m"].tolist(), second["m"].tolist()) == ([1, 2, 3], [9, 2, 3])


def test_without_the_loops_in_c_lists_stay_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treepack.files.input_files.number_lists.is_compiled", lambda: False)
    assert LineParser(NAMES).parse(b'{"m": [1, 2]}') == ({"m": [1, 2]}, False)


def read(reader: Format, lines_of_file: LineBlock, options: ReadOptions, arrays: bool) -> tuple[list[Any], str]:
    """The items of the lines, the damaged ones last, and the error."""
    skipped: list[Skipped] | None = [] if options.limits.skip_bad else None
    items: list[Any] = []
    try:
        for item in reader.trajectories(lines_of_file.records(skipped, reader.arrays if arrays else ()), options):
            items.append(item)
    except TreepackError as error:
        return plain(items), str(error)
    return plain([*items, *(skipped or [])]), ""


def plain(items: list[Any]) -> list[Any]:
    """`items` with the arrays of tokens as their type and values, so that they can be compared."""
    return [
        (replace(item, content=PromptCompletion("", "")), [named(item.content, name) for name in Tokens.__slots__])
        if isinstance(item, Trajectory) and isinstance(item.content, Tokens)
        else item
        for item in items
    ]


def named(content: Tokens, name: str) -> Any:
    """The field `name` as plain values; lists of different lengths as their numbers and offsets."""
    value = getattr(content, name)
    arrays = [value.values, value.offsets] if isinstance(value, RaggedArray) else [value]
    return None if value is None else (name, [(str(array.dtype), array.tolist()) for array in arrays])


REQUIRED = {
    "verl": ["prompt_ids", "response_ids", "response_mask"],
    "trl-grpo": ["prompt_ids", "completion_ids", "completion_mask"],
    "slime": ["tokens", "response_length", "status"],
    "prime-rl-sft": ["input_ids", "target_ids", "loss_mask"],
    "tokens": ["input_ids", "loss_mask"],
}


def token_line(rng: random.Random, required: list[str]) -> bytes:
    """A record with most of the fields `required` and some other fields; often one value is wrong."""
    num = rng.choice([1, 2, 3, 8])
    prompt = rng.randint(0, num)
    ids = [rng.randrange(150_000) for _ in range(num)]
    mask = [rng.randint(0, 1) for _ in range(num)]
    record: dict[str, Any] = {"id": rng.choice(["a", "b"]), "group_id": rng.randint(0, 2), "reward": 0.5}
    fields: dict[str, Any] = {
        "input_ids": ids,
        "loss_mask": mask,
        "prompt_ids": ids[:prompt],
        "response_ids": ids[prompt:],
        "response_mask": mask[prompt:],
        "labels": [each if flag else -100 for each, flag in zip(ids, mask, strict=True)],
        "attention_mask": [1] * num,
        "completion_ids": ids[prompt:],
        "completion_mask": mask[prompt:],
        "position_ids": list(range(num)),
        "logprobs": [-0.5] * num,
        "old_log_probs": [-0.25] * num,
        "target_ids": [*ids[1:], 0],
        "seq_lengths": [num],
        "response_length": num - prompt,
        "tokens": ids,
        "status": "completed",
    }
    others = rng.sample(list(fields), rng.choice([0, 0, 1, 2, 4]))
    record |= {name: fields[name] for name in [*(required if rng.random() < 0.9 else []), *others]}
    if rng.random() < 0.6:
        name = rng.choice(list(record))
        wrong: list[Any] = [
            None,
            True,
            [],
            [[1, 2]],
            [1, "a"],
            [1, None],
            [0.5, 1.0],
            [True, False],
            2**31,
            -1,
            5.0,
            "x",
            {},
            1,
        ]
        old = record[name]
        spoilt = rng.choice(wrong)
        if isinstance(old, list) and old and rng.random() < 0.8:
            old = list(old)
            old[rng.randrange(len(old))] = spoilt
            record[name] = old + [1] * rng.choice([0, 0, 1])
        else:
            record[name] = spoilt
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)


@pytest.mark.parametrize("reader", FAST, ids=lambda reader: reader.name)
def test_records_with_wrong_values_read_as_without_arrays(reader: Format) -> None:
    rng = random.Random(3)
    num_read = num_refused = 0
    for _ in range(400):
        block = LineBlock("r.jsonl", 7, token_line(rng, REQUIRED[reader.name]))
        options = ReadOptions(
            limits=RecordLimits(skip_bad=rng.random() < 0.5), train_all=rng.random() < 0.2, vocab_size=10**6
        )
        expected = read(reader, block, options, arrays=False)
        assert read(reader, block, options, arrays=True) == expected, block.data
        num_read += any(isinstance(item, tuple) for item in expected[0])
        num_refused += expected[1] != ""
    assert min(num_read, num_refused) > 50


def sample_lines(reader: Format) -> list[bytes]:
    """The records of the samples of a format, each as one line."""
    values = []
    for name, data in samples().items():
        if name.startswith(f"rollouts/{reader.name}") and name.endswith(".json"):
            value = orjson.loads(data)
            values += value if isinstance(value, list) else [value, *value.get("samples", [])]
        elif name.startswith(f"rollouts/{reader.name}") and name.endswith(".jsonl"):
            values += [orjson.loads(line) for line in data.splitlines()]
    return [orjson.dumps(value) + b"\n" for value in values if isinstance(value, dict)]


@pytest.mark.parametrize("reader", FAST, ids=lambda reader: reader.name)
def test_damaged_samples_read_as_without_arrays(reader: Format) -> None:
    rng = random.Random(4)
    intact = sample_lines(reader)
    assert intact
    num_read = 0
    for number in range(120):
        data = intact[number] if number < len(intact) else damaged(rng.choice(intact), rng)
        block = LineBlock("r.jsonl", 1, data)
        options = ReadOptions(limits=RecordLimits(skip_bad=rng.random() < 0.5))
        expected = read(reader, block, options, arrays=False)
        assert read(reader, block, options, arrays=True) == expected, data
        num_read += any(isinstance(item, tuple) for item in expected[0])
    assert num_read >= 10


def test_numbers_of_a_column_stay_numbers() -> None:
    line = b'{"prompts": [[5, 6], [5, 7]], "responses": [[1], [2]], "response_mask": [[1], [1]], "turns": [3, 4]}\n'
    (verl,) = (each for each in FAST if each.name == "verl")
    items, error = read(verl, LineBlock("r.jsonl", 1, line), ReadOptions(), arrays=True)
    assert not error
    assert [item.metadata for item, _ in items] == [{"turns": 3}, {"turns": 4}]
