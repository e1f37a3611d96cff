"""Capacities that are compared: candidates, the plan of the verdict, memory on a device, and the commands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.command_line import Run
from support.paths import SAMPLE_DATA
from support.strategies import make
from treepack.analysis.capacities import candidate_capacities, plan_capacities, usual_plan
from treepack.analysis.forecast import ForecastLine, ForecastRows, TrainingDevice, read_device
from treepack.analysis.glossary import readable_time
from treepack.analysis.trie_forecast import (
    PIECES,
    USABLE,
    ForecastTarget,
    forecast_packed,
    forecast_trie,
    memory_sentence,
    quick,
    read_target,
)
from treepack.costs.model_cost import FlopCount, read_shape
from treepack.files.manifest import read_manifest
from treepack.ingest.conversation_counts import conversations_of_manifest
from treepack.memory.model_memory import ModelMemory, NoPieces, read_memory
from treepack.pack.options import PackOptions
from treepack.report.figures import ReportSubject, measure
from treepack.report.words import headline, report_summary
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.store.trie_files import read_trie
from treepack.trie.totals import trie_totals
from treepack.trie.trie import Trie

GIB = 1 << 30
SHAPE = read_shape("qwen3-1.7b")


def memory_of(model: str) -> ModelMemory:
    found = read_memory(model)
    assert isinstance(found, ModelMemory)
    return found


MEMORY = memory_of("qwen3-1.7b")


def test_candidates_reach_from_the_longest_trajectory_to_whole_trees() -> None:
    prompt = [7] * 1_500
    trie = build_trie([make(str(i), [*prompt, *([i] * 20_000)]) for i in range(3)])
    # The default of `pack` is among them, although a row of 61,500 tokens has everything.
    assert candidate_capacities(trie, "auto") == [21_500, 32_768, 61_500, 65_536]
    short = build_trie([make("a", [1] * 10), make("b", [2] * 3)])
    assert candidate_capacities(short, "auto") == [10, 1_024, 2_048, 4_096, 8_192, 16_384]


@given(longest=st.integers(2, 100_000), sizes=st.sets(st.integers(1, 1 << 17), min_size=1, max_size=4))
def test_the_verdict_has_the_capacity_of_pack_or_the_nearest_to_it(longest: int, sizes: set[int]) -> None:
    trie = build_trie([make("a", [1]), make("b", [2] * longest)])
    planned = list(plan_capacities(trie, sorted(sizes), method="contiguous", too_long="drop"))
    chosen = planned[usual_plan(trie, planned)].plan.capacity
    default = 16_384 if longest <= 16_384 else 65_536 if longest <= 65_536 else 131_072
    if max(sizes) < longest:  # every capacity leaves one trajectory out
        assert chosen == max(sizes)
    elif default in sizes:
        assert chosen == default
    elif any(size > default for size in sizes):
        assert chosen == min(size for size in sizes if size > default)
    else:
        assert chosen == max(sizes)
    assert planned[::-1][usual_plan(trie, planned[::-1])].plan.capacity == chosen


def entry_of(size: int, longest: int, device: str) -> tuple[dict[str, Any], int]:
    """Return the entry of ten rows of `size` tokens on a device, and the number of GPUs."""
    rows = ForecastRows(size, FlopCount(10 * size, 10 * size * size // 4, 5 * size), 10, size, longest)
    line = ForecastLine("rows", size, rows.work, rows.work)
    report = forecast_packed([line], rows, read_target("qwen3-1.7b", device), [])
    (entry,) = report["capacities"]
    return entry, report["num_gpus"]


def test_whole_rows_that_fit_run_without_pieces_and_recompute_as_few_layers_as_possible() -> None:
    short, long = (entry_of(size, 8_000, "h200")[0] for size in (8_192, 65_536))
    limit = USABLE * read_device("h200").memory  # type: ignore[operator]
    assert (short["carry"], short["num_bytes"]) == (None, MEMORY.in_rows(8_192, 0))
    assert (long["carry"], long["fits"]) == (None, True)
    fewest = next(count for count in range(1, 29) if MEMORY.in_rows(65_536, count) <= limit)
    assert long["num_bytes"] == MEMORY.in_rows(65_536, fewest)


@pytest.mark.parametrize("device", ["h100", "h200"])
def test_longer_rows_run_in_the_largest_pieces_that_fit(device: str) -> None:
    entry, num_gpus = entry_of(10**6, 50_000, device)
    limit = USABLE * read_device(device).memory  # type: ignore[operator]
    fitting = [piece for piece in PIECES if MEMORY.in_pieces(10**6, piece, 50_000) <= limit]
    assert (entry["carry"], entry["fits"], num_gpus) == (max(fitting), True, 1)
    assert entry["num_bytes"] == MEMORY.in_pieces(10**6, max(fitting), 50_000) <= limit
    assert len(fitting) < len(PIECES)


def test_weights_are_divided_until_the_rows_fit() -> None:
    target = read_target("qwen3-8b", "h200")
    rows = ForecastRows(10**6, FlopCount(10**7, 10**9, 10**6), 10, 10**6, 30_000)
    found = forecast_packed([ForecastLine("rows", 10**6, rows.work, rows.work)], rows, target, [])
    (entry,), memory = found["capacities"], memory_of("qwen3-8b")
    limit = USABLE * read_device("h200").memory  # type: ignore[operator]
    assert (found["num_gpus"], entry["fits"]) == (2, True)
    assert memory.in_pieces(10**6, min(PIECES), 30_000) > limit
    assert entry["num_bytes"] == memory.in_pieces(10**6, entry["carry"], 30_000) - memory.state // 2
    # Two ranks divide the weights from the start.
    both = forecast_packed([ForecastLine("rows", 10**6, rows.work, rows.work)], rows, replace(target, ranks=2), [])
    assert (both["num_gpus"], both["capacities"]) == (2, [entry])


def test_without_a_known_memory_all_layers_are_recomputed() -> None:
    entry, num_gpus = entry_of(10**6, 50_000, "400")
    assert (entry["carry"], entry["fits"], num_gpus) == (None, None, 1)
    assert entry["num_bytes"] == MEMORY.in_rows(10**6, 28)


def test_memory_is_one_sentence() -> None:
    def sentence(model: str, device: str, *, ranks: int = 1, num_gpus: int = 1, size: int = 0) -> str:
        target = read_target(model, device, ranks=ranks)
        rows = {"capacity": 8_192, "carry": None, "num_bytes": memory_of(model).state // num_gpus + size}
        return memory_sentence(rows, target, num_gpus=num_gpus)

    assert sentence("qwen3-8b", "h200", num_gpus=2) == (
        "qwen3-8b with AdamW in fp32 does not fit one h200; use 2 GPUs or LoRA"
    )
    # Frozen weights of 70 billion parameters need 282 GB.
    assert sentence("llama-3.1-70b", "h100", num_gpus=16).endswith("does not fit one h100; use 16 GPUs")
    assert sentence("qwen3-8b", "h100", ranks=2, num_gpus=4).endswith("does not fit 2 h100; use 4 GPUs or LoRA")
    assert sentence("qwen3-1.7b", "h100", size=1 << 30) == (
        "qwen3-1.7b with AdamW in fp32 fits one h100: rows of 8,192 tokens need 26.6 GiB of 79"
    )
    assert "the memory of the device is not known" in sentence("qwen3-1.7b", "400")
    unknown = ForecastTarget(SHAPE, NoPieces("it is made up"), TrainingDevice(None, 1e12))
    assert memory_sentence({}, unknown, num_gpus=1) == "the memory of qwen3-1.7b is not estimated: it is made up"


def test_times_have_a_unit_that_fits() -> None:
    times = (1e-5, 0.00123, 4.321, 119.0, 120.0, 7199.0, 7200.0, 200_000.0)
    words = ["below 1 ms", "0.00123 s", "4.32 s", "119 s", "2 min", "120 min", "2 h", "2.31 days"]
    assert [readable_time(each) for each in times] == words


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the trie of the sample conversations."""
    from treepack.ingest.options import BuildOptions
    from treepack.trie.directory import build_trie_directory

    out = tmp_path_factory.mktemp("choice") / "trie"
    build_trie_directory([SAMPLE_DATA / "chat.jsonl"], out, BuildOptions(tokenizer=str(SAMPLE_DATA / "tokenizer")))
    return out


@pytest.fixture(scope="module")
def trie(chats: Path) -> Trie:
    return read_trie(chats)


def test_pack_takes_the_capacity_that_stats_names(treepack: Run, chats: Path, tmp_path: Path) -> None:
    forecast = treepack("stats", chats, "--json").json["forecast"]
    assert isinstance(forecast, dict)
    done = treepack("pack", chats, "--out", tmp_path / "usual")
    capacity = forecast["gain"]["capacity"]
    assert f"- rows of {capacity:,} tokens: the usual capacity that every trajectory fits; treepack stats" in done.out
    assert read_manifest(tmp_path / "usual")["capacity"] == capacity
    given = treepack("pack", chats, "--capacity", "16k", "--out", tmp_path / "given")
    assert "- rows of" not in given.out


def test_packed_rows_have_the_memory_of_their_plan(treepack: Run, chats: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    assert treepack("pack", chats, "--capacity", 4096, "--effort", "low", "--out", packed).status == 0
    after, planned = (
        treepack("stats", path, *more, "--model", "qwen3-1.7b", "--json").json["forecast"]
        for path, more in ((packed, ()), (chats, ("--capacity", 4096)))
    )
    assert isinstance(after, dict)
    assert isinstance(planned, dict)
    assert (after["capacities"], after["memory"]) == (planned["capacities"], planned["memory"])


def test_the_report_has_the_headline_of_stats(treepack: Run, chats: Path, trie: Trie) -> None:
    report = treepack("stats", chats, "--json").json
    forecast, shape = report["forecast"], read_target("qwen3-8b", "h200").shape
    assert isinstance(forecast, dict)
    conversations = conversations_of_manifest(read_manifest(chats))
    subject = ReportSubject("made", trie, conversations=conversations)
    figures = measure(subject, shape, memory=read_memory("qwen3-8b"))
    assert figures.forecast["verdict"] == forecast["verdict"]
    assert forecast["verdict"].startswith(headline(figures).removesuffix("."))


def test_stats_and_the_page_have_the_sentence_about_memory(treepack: Run) -> None:
    done = treepack("stats", SAMPLE_DATA / "tokens.jsonl", "--model", "qwen3-1.7b")
    sentence = "qwen3-1.7b with AdamW in fp32 fits one h200: rows of 16,384 tokens need 42.2 GiB of 139."
    assert f"\n{sentence}" in done.out
    hybrid = treepack("stats", SAMPLE_DATA / "tokens.jsonl", "--model", "qwen3.5-4b")
    assert "\nthe memory of qwen3.5-4b is not estimated: layer 0 is recurrent" in hybrid.out
    subject = ReportSubject("made", build_trie([make("a", [0, 1, 2, 3, 4]), make("b", [0, 1, 2, 5])]))
    sentences: tuple[tuple[ModelMemory | NoPieces, str], ...] = (
        (
            MEMORY,
            "Memory: qwen3-1.7b with AdamW in fp32 fits one h200: rows of 16,384 tokens need 26.8 GiB of 139 (an esti",
        ),
        (NoPieces("it is made up"), "Memory: the memory of qwen3-1.7b is not estimated: it is made up."),
    )
    for memory, sentence in sentences:
        text = report_summary(subject, measure(subject, SHAPE, memory=memory))
        assert len([line for line in text if line.startswith(sentence)]) == 1
    assert not [line for line in report_summary(subject, measure(subject, SHAPE)) if line.startswith("Memory")]


@pytest.mark.parametrize("model", [(), ("--model", "qwen3-1.7b")])
def test_the_page_has_memory_of_a_model_that_the_user_named_only(
    treepack: Run, tmp_path: Path, model: tuple[str, ...]
) -> None:
    treepack("report", SAMPLE_DATA / "tokens.jsonl", *model, "--out", tmp_path / "r.html")
    assert ("Memory: " in (tmp_path / "r.html").read_text()) == bool(model)


def test_whole_groups_fit_every_candidate(trie: Trie) -> None:
    options = quick(PackOptions(method="groups"))
    sizes = candidate_capacities(trie, options.method)
    _, planned = forecast_trie(
        trie, read_target("qwen3-8b", "h200"), conversations=None, totals=trie_totals(trie), options=options
    )
    assert [each.plan.capacity for each in planned] == sizes
    assert sizes[0] == 6_753
    assert all(each.plan.method == "groups" for each in planned)


@pytest.mark.parametrize(
    ("command", "option", "remedy"),
    [
        ("pack", ("--device", "h100"), "--device is gone; pack takes 16k, 64k or the next power of two; for"),
        ("prepare", ("--device", "h100"), "--device is gone; pack takes 16k"),
        (
            "stats",
            ("--carry", "4k"),
            "--carry is gone; stats takes the largest pieces that fit; train chooses",
        ),
        (
            "pack",
            ("--model", "qwen3-8b"),
            "and chooses no capacity; give --balance too, or --capacity",
        ),
        ("prepare", ("--model", "qwen3-8b"), "and chooses no capacity; give --balance too"),
    ],
)
def test_an_option_that_is_gone_names_its_remedy(
    treepack: Run, tmp_path: Path, command: str, option: tuple[str, str], remedy: str
) -> None:
    out = () if command == "stats" else ("--out", tmp_path / "out")
    done = treepack(command, tmp_path, *option, *out)
    assert done.status == 2
    assert remedy in " ".join(done.err.split())
