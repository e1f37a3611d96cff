"""The forecast of rows in pieces: sizes that fit a device, sentences, and the commands that print them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.command_line import Run
from support.paths import SAMPLE_DATA
from support.strategies import make
from treepack.analysis.capacities import forecast_lines, plan_capacities
from treepack.analysis.carried_cost import TrunkTokens
from treepack.analysis.carried_report import PIECES, USABLE, RowsToCarry, carried_report, rows_of_plans, sizes_of_pieces
from treepack.analysis.forecast import TrainingDevice, read_device
from treepack.costs.model_cost import FlopCount, operations, read_shape
from treepack.errors import TreepackError
from treepack.memory.model_memory import ModelMemory, NoPieces, read_memory
from treepack.report.figures import ReportSubject, measure
from treepack.report.words import report_summary
from treepack.trie.builders.in_memory import build_trie

GIB = 1 << 30
MODEL = "qwen3-1.7b"
SHAPE = read_shape(MODEL)


def memory_of_model() -> ModelMemory:
    found = read_memory(MODEL)
    assert isinstance(found, ModelMemory)
    return found


MEMORY = memory_of_model()


def rows(capacity: int | None, size: int, trunk: int, *, left_out: int = 0) -> RowsToCarry:
    """Return ten rows of `size` tokens, `trunk` of each on one path for every size of a piece."""
    work = FlopCount(10 * size, 10 * size * size // 4, 5 * size)
    trunks = tuple(
        TrunkTokens(piece, 10 * trunk, trunk) if piece < size else TrunkTokens(piece, 0, 0) for piece in PIECES
    )
    return RowsToCarry(capacity, left_out, work, size, size // 2, trunks)


def report_of(lines: list[RowsToCarry], device: str = "h200") -> dict[str, Any]:
    found = carried_report(lines, SHAPE, MEMORY, read_device(device))
    assert json.loads(json.dumps(found)) == found
    return found


def test_the_largest_piece_that_fits_is_chosen() -> None:
    for device in ("h100", "h200"):
        (line,) = report_of([rows(None, 10**6, 50_000)], device)["lines"]
        memory = read_device(device).memory
        assert memory is not None
        assert line["fits_carry"] is True
        assert line["bytes_carry"] <= USABLE * memory
        larger = 2 * line["carry"]
        assert larger in PIECES
        assert MEMORY.in_pieces(10**6, larger, 50_000) > USABLE * memory


def test_a_path_that_leaves_no_room_for_long_pieces_is_in_host_memory() -> None:
    found = report_of([rows(None, 10**6, 75_000)], "h100")
    (line,) = found["lines"]
    memory = read_device("h100").memory
    assert memory is not None
    # With the path on the GPU, only pieces of 4,096 tokens would fit.
    fitting = [piece for piece in PIECES if MEMORY.in_pieces(10**6, piece, 75_000) <= USABLE * memory]
    assert fitting == [4_096]
    assert line["carry"] == 16_384
    assert line["bytes_carry"] <= USABLE * memory
    assert line["bytes_host"] == 75_000 * (MEMORY.path - 4 * 16 * 28)  # but for a log-sum-exp of 16 heads in 28 layers
    assert found["notes"] == ["the path of rows of whole trees (--capacity 1000000) is in host memory"]


def test_without_a_known_memory_pieces_have_the_usual_size() -> None:
    found = report_of([rows(None, 10**6, 50_000)], "400")
    assert [(line["carry"], line["fits_rows"], line["fits_carry"]) for line in found["lines"]] == [(16_384, None, None)]
    assert found["lines"][0]["recomputed_layers"] == 28
    assert found["notes"] == ["the memory of the device is not known, so without --carry all layers are recomputed"]


def test_hours_without_pieces_are_those_of_the_forecast_if_all_layers_are_recomputed() -> None:
    device = TrainingDevice("made", 1e14, 10 * GIB)
    lines = [rows(None, 10**6, 50_000)]
    (line,) = carried_report(lines, SHAPE, MEMORY, device)["lines"]
    assert line["recomputed_layers"] == 28
    assert line["hours_rows"] == pytest.approx(operations(SHAPE, lines[0].work) / 0.5e14 / 3600)
    assert line["hours_carry"] == pytest.approx(line["hours_rows"] / line["speedup"])


def test_rows_that_leave_trajectories_out_have_a_note() -> None:
    found = report_of([rows(None, 10**6, 20_000), rows(16_384, 16_384, 5_000, left_out=3)])
    assert found["notes"] == ["rows of 16,384 tokens leave out 3 longer trajectories"]


def test_rows_shorter_than_a_piece_need_no_pieces() -> None:
    found = report_of([rows(4_096, 4_000, 0)])
    (line,) = found["lines"]
    assert (line["speedup"], line["recomputed_layers"], line["bytes_rows"]) == (1.0, 0, line["bytes_carry"])


def test_a_model_without_a_forecast_has_a_reason_and_no_numbers() -> None:
    found = carried_report([rows(None, 10**5, 20_000)], SHAPE, NoPieces("it is made up"), read_device("h200"))
    assert (found["lines"], found["obstacle"]) == ([], "it is made up")


def test_a_size_of_a_piece_is_positive() -> None:
    assert (sizes_of_pieces(None), sizes_of_pieces(300)) == (PIECES, (300,))
    with pytest.raises(TreepackError, match="carry is 0; expected a positive number of tokens"):
        sizes_of_pieces(0)


def test_whole_trees_come_first_and_then_the_rows_of_each_plan() -> None:
    trie = build_trie([make("a", [0, 1, 2, 3, 4]), make("b", [0, 1, 2, 5, 6, 7]), make("c", [9, 9])])
    planned = list(plan_capacities(trie, [6, 16], method="contiguous", too_long="error"))
    found = rows_of_plans(trie, planned, (2,))
    # The first tree has 8 tokens, of which 0, 1, 2 and 5 are trunk. In rows of 6 tokens, a and b are apart: 3 and 4 are
    # trunk, of 5 and 6 tokens. One row of 16 tokens contains everything.
    assert [(each.capacity, each.num_rows, each.row_tokens, each.longest, each.trunks) for each in found] == [
        (None, 2, 8, 6, (TrunkTokens(2, 4, 4),)),
        (6, 3, 6, 6, (TrunkTokens(2, 7, 4),)),
        (16, 1, 10, 6, (TrunkTokens(2, 4, 4),)),
    ]
    lines = forecast_lines(trie, planned, method="contiguous")
    assert [each.work for each in found] == [line.packed for line in lines[:3]]


def carry_of(treepack: Run, *arguments: str | Path | int) -> dict[str, Any]:
    forecast = treepack("stats", *arguments, "--model", MODEL, "--json").json["forecast"]
    assert isinstance(forecast, dict)
    return dict(forecast["carry"])


def test_packed_rows_have_the_forecast_of_their_plan(treepack: Run, tmp_path: Path) -> None:
    trie, packed = tmp_path / "trie", tmp_path / "packed"
    assert treepack("build-trie", SAMPLE_DATA / "tokens.jsonl", "--out", trie).status == 0
    assert treepack("pack", trie, "--capacity", 4096, "--effort", "low", "--out", packed).status == 0
    after = carry_of(treepack, packed, "--carry", 700)
    planned = carry_of(treepack, trie, "--carry", 700, "--capacity", 4096)["lines"]
    assert after["lines"] == planned[1:]
    assert 0 < after["lines"][0]["tokens_trunk"] < after["lines"][0]["tokens_computed"]


def test_stats_and_the_page_have_the_sentence(treepack: Run) -> None:
    done = treepack("stats", SAMPLE_DATA / "tokens.jsonl", "--carry", "1k", "--model", MODEL)
    sentence = "qwen3-1.7b with AdamW in fp32 fits one h200: rows of 16,384 tokens need 42.2 GiB of 139."
    assert f"\n{sentence}" in done.out
    hybrid = treepack("stats", SAMPLE_DATA / "tokens.jsonl", "--model", "qwen3.5-4b")
    assert "\nthe memory of qwen3.5-4b is not estimated: layer 0 is recurrent" in hybrid.out
    subject = ReportSubject("made", build_trie([make("a", [0, 1, 2, 3, 4]), make("b", [0, 1, 2, 5])]))
    sentences: tuple[tuple[ModelMemory | NoPieces, str], ...] = (
        (MEMORY, "Memory: qwen3-1.7b with AdamW in fp32 fits one h200: rows of 16,384 tokens need 26.8 GiB of 139"),
        (NoPieces("it is made up"), "Memory: the memory of qwen3-1.7b is not estimated: it is made up."),
    )
    for memory, sentence in sentences:
        text = report_summary(subject, measure(subject, SHAPE, memory=memory))
        assert len([line for line in text if line.startswith(sentence)]) == 1
    assert not [line for line in report_summary(subject, measure(subject, SHAPE)) if line.startswith("Memory")]
