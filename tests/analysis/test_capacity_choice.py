"""The choice of a capacity: against brute force over made-up estimates and rows, and on the sample data."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.command_line import Run
from support.paths import SAMPLE_DATA
from support.strategies import make
from treepack.analysis.capacity_choice import (
    NEAR,
    STEP_TOKENS,
    USUAL,
    CapacityEstimate,
    RowCosts,
    candidate_capacities,
    choice_sentence,
    choose_estimate,
    estimate_time,
    waiting,
)
from treepack.analysis.forecast import TrainingDevice
from treepack.analysis.glossary import readable_time
from treepack.analysis.trie_forecast import ForecastTarget, compare_capacities, memory_sentence, quick, read_target
from treepack.files.manifest import read_manifest
from treepack.ingest.conversations import conversations_of_manifest
from treepack.memory.model_memory import NoPieces, read_memory
from treepack.pack.options import PackOptions
from treepack.report.figures import ReportSubject, measure
from treepack.report.words import headline
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.store.trie_files import read_trie
from treepack.trie.trie import Trie


@st.composite
def measurements(draw: st.DrawFn) -> list[CapacityEstimate]:
    """Return estimates of different capacities with any times; at least one of each set of fits and left out."""
    capacities = draw(st.lists(st.sampled_from([1 << k for k in range(8, 20)]), min_size=1, unique=True))
    seconds = st.one_of(st.floats(0.1, 1e6), st.floats(1.0, 1.06))
    return [
        CapacityEstimate(
            capacity,
            draw(st.integers(0, 1)),
            num_rows=1,
            tokens_packed=1,
            flops=1.0,
            seconds=draw(seconds),
            waiting=1.0,
            fits=draw(st.sampled_from([True, False, None])),
        )
        for capacity in capacities
    ]


@given(measurements())
def test_the_choice_is_near_the_fastest_of_all_that_could_be_taken(estimates: list[CapacityEstimate]) -> None:
    chosen = choose_estimate(estimates)
    fewest = min(each.num_left_out for each in estimates)
    able = [each for each in estimates if each.num_left_out == fewest]
    able = [each for each in able if each.fits is not False] or able
    assert chosen in able
    assert all(chosen.seconds <= (1 + NEAR) * each.seconds for each in able)
    # No capacity between the usual one and the choice would do, and if the choice is shorter, no usual one would.
    near = {each.capacity for each in able if each.seconds <= (1 + NEAR) * min(other.seconds for other in able)}
    assert not near & {size for size in near if USUAL <= size < chosen.capacity}
    assert chosen.capacity >= USUAL or max(near) == chosen.capacity
    assert choose_estimate(estimates[::-1]) == chosen


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=6),
    st.integers(1, 3),
)
def test_waiting_is_at_most_that_of_the_longest_first_rule_and_at_least_the_optimum(
    costs: list[int], ranks: int
) -> None:
    # All rows are in one optimiser step, because it takes far more tokens.
    rows = RowCosts(np.ones(len(costs), np.int64), np.array(costs, np.float64), np.zeros(len(costs), np.int64))
    found = waiting(rows, ranks=ranks, launch_seconds=0.0)
    best = min(
        max(sum(cost for cost, rank in zip(costs, given, strict=True) if rank == each) for each in range(ranks))
        for given in product(range(ranks), repeat=len(costs))
    )
    optimum = best * ranks / sum(costs)
    # Graham: longest first is at most 4/3 - 1/(3 ranks) of the optimum.
    assert optimum - 1e-9 <= found <= optimum * (4 / 3 - 1 / (3 * ranks)) + 1e-9


def test_short_rows_cost_launches_only_if_a_step_has_few_tokens() -> None:
    def of(size: int, count: int) -> float:
        rows = RowCosts(np.full(count, size), np.full(count, size * 1e-5), np.zeros(count, np.int64))
        return waiting(rows, ranks=1, launch_seconds=0.13)

    # 131,072 tokens of a step are four passes of 0.33 s, however short the rows are that are joined into them.
    assert of(2_048, 640) == of(32_768, 40) == 1.0
    # A single row of 2,048 tokens computes for 0.02 s and waits for the launches of its pass.
    assert of(2_048, 1) == pytest.approx(0.13 / 0.02048)


def test_rows_of_different_training_steps_do_not_share_an_optimiser_step() -> None:
    steps = np.array([0, 0, 1, 1])
    rows = RowCosts(np.full(4, 100), np.array([3.0, 3.0, 1.0, 1.0]), steps)
    assert waiting(rows, ranks=2, launch_seconds=0.0) == 1.0
    alone = replace(rows, steps=np.array([0, 1, 1, 1]))
    # Step 0 is one row of 3 on two ranks; step 1 has 3, 1 and 1: 3 on one rank, 2 on the other.
    assert waiting(alone, ranks=2, launch_seconds=0.0) == pytest.approx((3 + 3) * 2 / 8)


def test_long_rows_wait_for_the_slowest_rank() -> None:
    generator = np.random.default_rng(1)
    sizes = generator.integers(1, 9, 400) * STEP_TOKENS
    rows = RowCosts(sizes, np.asarray(sizes * 1e-5, np.float64), np.zeros(400, np.int64))
    even = RowCosts(np.full(400, STEP_TOKENS), np.full(400, 1.3), np.zeros(400, np.int64))
    assert waiting(even, ranks=4, launch_seconds=0.0) == 1.0
    assert waiting(rows, ranks=4, launch_seconds=0.0) > 1.3
    assert waiting(rows, ranks=1, launch_seconds=0.0) == 1.0


def test_the_way_to_train_is_the_fastest_that_fits() -> None:
    line = {"hours_rows": 2.0, "bytes_rows": 9, "fits_rows": True, "hours_carry": 1.0, "carry": 4096, "bytes_carry": 8}
    for fits, expected in (
        (True, (3600.0, 4096, 8, True)),
        (None, (3600.0, 4096, 8, None)),
        (False, (7200.0, None, 9, True)),
    ):
        assert estimate_time(line | {"fits_carry": fits}) == expected
    assert estimate_time(line | {"fits_carry": False, "fits_rows": False}) == (3600.0, 4096, 8, False)
    same = line | {"hours_carry": 2.0, "fits_carry": True}
    assert estimate_time(same)[1] is None


def test_candidates_reach_from_the_longest_trajectory_to_whole_trees() -> None:
    prompt = [7] * 1_500
    trie = build_trie([make(str(i), [*prompt, *([i] * 20_000)]) for i in range(3)])
    assert candidate_capacities(trie) == [21_500, 32_768, 61_500]
    short = build_trie([make("a", [1] * 10), make("b", [2] * 3)])
    assert candidate_capacities(short) == [10, 1_024, 2_048, 4_096, 8_192, 16_384]


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


@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b", "qwen3.5-4b"])
def test_on_the_sample_data_every_candidate_is_tried_and_the_choice_is_within_three_per_cent(
    trie: Trie, model: str
) -> None:
    for ranks in (1, 4):
        target, options = read_target(model, "h200", ranks=ranks), quick(PackOptions(balance=ranks))
        compared = compare_capacities(trie, target, options=options)
        assert [each.capacity for each in compared.estimates] == candidate_capacities(trie)
        # One capacity at a time gives the same, except that the weights may be divided over fewer GPUs.
        alone = [
            compare_capacities(trie, target, capacities=[size], options=options).chosen
            for size in candidate_capacities(trie)
        ]
        assert [each.tokens_packed for each in alone] == [each.tokens_packed for each in compared.estimates]
        fitting = [each for each in compared.estimates if each.fits is not False]
        assert compared.chosen.seconds <= 1.03 * min(each.seconds for each in fitting)


def test_more_ranks_prefer_shorter_rows(trie: Trie) -> None:
    chosen = [
        compare_capacities(trie, read_target("qwen3-0.6b", "h200", ranks=ranks), options=quick(PackOptions())).chosen
        for ranks in (1, 16)
    ]
    assert chosen[0].waiting == 1.0
    assert chosen[1].capacity < chosen[0].capacity


def test_the_sentence_of_a_choice_names_time_memory_and_its_neighbours() -> None:
    first = CapacityEstimate(8_192, 0, 9, 10, 1.0, 600.0, 1.0, None, 30 << 30, True)
    chosen = replace(first, capacity=16_384, seconds=500.0, carry=4_096)
    large = replace(first, capacity=32_768, seconds=400.0, fits=False)
    far = replace(first, capacity=65_536, seconds=300.0, fits=False)
    assert choice_sentence([far, large, chosen, first], chosen, where="qwen3-8b on one h200") == (
        "8.33 min expected for qwen3-8b on one h200, 30.0 GiB of a GPU with train --carry 4096; "
        "10 min in rows of 8,192 and 6.67 min in rows of 32,768, too large"
    )


def test_memory_is_one_sentence() -> None:
    def sentence(model: str, device: str, *, ranks: int = 1, num_gpus: int = 1, size: int = 0) -> str:
        target = read_target(model, device, ranks=ranks)
        assert not isinstance(target.memory, NoPieces)
        rows = CapacityEstimate(8_192, 0, 9, 10, 1.0, 1.0, 1.0, None, target.memory.state // num_gpus + size, True)
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
    shape = read_target("qwen3-1.7b", "h100").shape
    unknown = ForecastTarget(shape, NoPieces("it is made up"), TrainingDevice(None, 1e12), 1, (4096,))
    rows = CapacityEstimate(8, 0, 1, 1, 1.0, 1.0, 1.0)
    assert memory_sentence(rows, unknown, num_gpus=1) == "the memory of qwen3-1.7b is not estimated: it is made up"


def test_times_have_a_unit_that_fits() -> None:
    times = (1e-5, 0.00123, 4.321, 119.0, 120.0, 7199.0, 7200.0, 200_000.0)
    words = ["below 1 ms", "0.00123 s", "4.32 s", "119 s", "2 min", "120 min", "2 h", "2.31 days"]
    assert [readable_time(each) for each in times] == words


def test_pack_chooses_what_stats_names_and_equals_the_bytes_of_that_capacity(
    treepack: Run, chats: Path, tmp_path: Path
) -> None:
    model = ("--model", "qwen3-0.6b")
    forecast = treepack("stats", chats, *model, "--json").json["forecast"]
    assert isinstance(forecast, dict)
    chosen = forecast["gain"]["capacity"]
    done = treepack("pack", chats, *model, "--out", tmp_path / "chosen")
    assert done.status == 0, done.err
    assert f"- rows of {chosen:,} tokens: " in done.out
    assert read_manifest(tmp_path / "chosen")["capacity"] == chosen
    assert treepack("pack", chats, "--capacity", chosen, "--out", tmp_path / "given").status == 0
    for name in sorted(path.name for path in (tmp_path / "given").iterdir()):
        assert (tmp_path / "chosen" / name).read_bytes() == (tmp_path / "given" / name).read_bytes()


def test_the_report_has_the_headline_of_stats(treepack: Run, chats: Path, trie: Trie) -> None:
    report = treepack("stats", chats, "--json").json
    forecast, shape = report["forecast"], read_target("qwen3-8b", "h200").shape
    assert isinstance(forecast, dict)
    conversations = conversations_of_manifest(read_manifest(chats))
    subject = ReportSubject("made", trie, conversations=conversations)
    figures = measure(subject, shape, memory=read_memory("qwen3-8b"))
    assert figures.forecast["verdict"] == forecast["verdict"]
    assert forecast["verdict"].startswith(headline(figures).removesuffix("."))


def test_pack_without_a_capacity_and_a_model_says_what_to_give(treepack: Run, chats: Path, tmp_path: Path) -> None:
    done = treepack("pack", chats, "--out", tmp_path / "usual")
    note = "- rows of 16,384 tokens: the usual capacity that every trajectory fits; --model MODEL takes the one that"
    assert note in done.out
    given = treepack("pack", chats, "--capacity", "16k", "--out", tmp_path / "given")
    assert "- rows of" not in given.out


def test_a_device_without_a_model_is_refused(treepack: Run, tmp_path: Path) -> None:
    done = treepack("pack", tmp_path, "--device", "h100", "--out", tmp_path / "out")
    assert (done.status, "give --model too" in done.err) == (2, True)


def test_an_order_of_candidates_changes_nothing(trie: Trie) -> None:
    target, options = read_target("qwen3-8b", "h200"), quick(PackOptions())
    found = {
        compare_capacities(trie, target, capacities=sizes, options=options).chosen
        for sizes in permutations((4_096, 8_192, 16_384))
    }
    assert len(found) == 1
