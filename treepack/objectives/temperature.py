"""The temperature at which the log-probabilities of a packed directory are computed, and the refusal of contradictions.

    column term_temperature, option --temperature --check_term_temperatures--> one temperature for all, or a refusal
    the same                                      --temperature_of_terms--> 0.7, "data", "data, 1 where missing"

Losses of reinforcement learning are about the distribution that was sampled, softmax(logits / temperature). sft and
losses of pairs have nothing to do with the sampler and compute at 1. A column with old or reference log-probabilities
is useful only if the loss computes the current ones at the same temperature, over the same words, so
`treepack logprobs` records both in the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from treepack.data.dataset import PackedDataset
from treepack.data.temperatures import temperature_range
from treepack.errors import TreepackError
from treepack.objectives.objective import Objective


def check_term_temperatures(datasets: Sequence[PackedDataset], objective: Objective) -> None:
    """Refuse temperatures that the loss cannot train, and columns of log-probabilities at other temperatures.

    Raises:
        TreepackError: as `refuse_temperatures` and `check_scored_columns`.
    """
    if objective.is_policy:
        refuse_temperatures(datasets, objective.temperature)
    for dataset in datasets:
        check_scored_columns(dataset, objective)


def refuse_temperatures(datasets: Sequence[PackedDataset], temperature: float | None) -> None:
    """Refuse temperatures of the data that cannot be trained or that contradict the option.

    Args:
        datasets: the directories of one run.
        temperature: the option, for terms without a temperature, or None.

    Raises:
        TreepackError: a temperature is 0 or differs from the option; or some terms have one, others do not, and there
            is no option.
    """
    ranges = [temperature_range(dataset) for dataset in datasets]
    for dataset, found in zip(datasets, ranges, strict=True):
        if found is None:
            # Without a temperature anywhere it is 1. Beside other directories with one, this would be a guess.
            if temperature is None and any(each is not None for each in ranges):
                raise TreepackError(f"{dataset.path}: has no temperatures and other rows have them; {_GAPS}")
            continue
        low, high, missing = found
        if low == 0:
            raise TreepackError(
                f"{dataset.path}: some tokens were sampled at the temperature 0, but ratios need the probabilities of "
                "a sampler, and greedy sampling has none; leave these rollouts out, or compute reference "
                "log-probabilities at 1 with treepack logprobs --ignore-temperature"
            )
        if missing and temperature is None:
            raise TreepackError(f"{dataset.path}: {missing:,} terms have no temperature and others have one; {_GAPS}")
        wrong = [value for value in (low, high) if temperature is not None and value != _round(temperature)]
        if wrong and not np.isnan(low):
            raise TreepackError(
                f"{dataset.path}: temperature is {temperature:g}, but the data has {_shortest(wrong[0]):g}; omit "
                "--temperature, which only fills gaps"
            )


_GAPS = "give the sampler's temperature for them as --temperature"


def temperature_of_terms(dataset: PackedDataset, temperature: float | None) -> float | str:
    """Return the temperature of all terms, or a phrase if it varies; equal results mean equal temperatures."""
    found = temperature_range(dataset)
    fill = 1.0 if temperature is None else temperature
    if found is None or np.isnan(found[0]):
        return _shortest(fill)
    low, high, missing = found
    if low == high and (not missing or low == _round(fill)):
        return _shortest(low)
    return f"data, {_shortest(fill):g} where missing" if missing else "data"


def check_scored_columns(dataset: PackedDataset, objective: Objective) -> None:
    """Refuse a column of `treepack logprobs` at another temperature, or over other words, than the loss computes.

    Raises:
        TreepackError: naming the column and the difference.
    """
    entries: dict[str, Any] = dataset.manifest.get("logprobs") or {}
    used = [column for column in ("old", "ref", "teacher") if column in entries and _reads(objective, column)]
    if not used:
        return
    expected = 1.0 if objective.has_pairs else temperature_of_terms(dataset, objective.temperature)
    has_sets, words = "term_kept_ids" in dataset.term_columns, ("over the whole vocabulary", "over kept sets")
    remedy = "and the --temperature of train, if there is one, without --ignore-temperature"
    for column in used:
        # A teacher's likeliest words are over the whole vocabulary in any case.
        reads_logprobs = column == "old" or f"term_{column}_logprob" in objective.columns
        for entry in _writers(entries[column]):
            recorded, over_sets = entry.get("temperature", 1.0), entry.get("kept_sets", False)
            if recorded != expected:
                found = f"at the temperature {_phrase(recorded)}", f"at {_phrase(expected)}"
            elif has_sets and reads_logprobs and over_sets != objective.is_policy:
                found = words[over_sets], words[objective.is_policy]
            else:
                continue
            raise TreepackError(
                f"{dataset.path}: term_{column}_logprob was computed {found[0]}, and the loss {objective.name} "
                f"computes {found[1]}; write it again with `treepack logprobs --column {column}` "
                f"{'with --ignore-temperature' if objective.has_pairs else remedy}"
            )


def _writers(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the entry of each model that wrote a part of a column, by `--groups`."""
    yield entry
    if isinstance(others := entry.get("others"), dict):
        yield from _writers(others)


def _reads(objective: Objective, column: str) -> bool:
    # Every policy loss reads old log-probabilities if they are there.
    if column == "old":
        return objective.is_policy
    names = {"ref": ("term_ref_logprob",), "teacher": ("term_teacher_logprob", "term_teacher_topk_logprobs")}
    return not {*names.get(column, ())}.isdisjoint(objective.columns)


def _phrase(temperature: float | str) -> str:
    return f"of the {temperature}" if isinstance(temperature, str) else f"{temperature:g}"


def _round(value: float) -> float:
    # Columns are float32: 0.7 -> 0.699999988...
    return float(np.float32(value))


def _shortest(value: float) -> float:
    # The shortest decimal with the same float32 value: 0.699999988... -> 0.7
    return float(str(np.float32(value)))
