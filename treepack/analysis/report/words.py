"""A report in sentences: the summary that a reader sees before any chart.

Figures, Subject --headline, summary, captions--> plain text
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treepack.analysis.report.figures import Figures, Subject
from treepack.trajectory import Int64

FEW_REPEATS = 0.02  # overlap below which the headline gives no number


def headline(por: float) -> str:
    """Return the share of repeated tokens as a sentence."""
    if por <= 0:
        return "No token is a repeat."
    if por < FEW_REPEATS:
        return "Hardly any token is a repeat."
    if por >= 0.95:  # "10 of 10" would be wrong; never "100 of 100" either
        return f"{min(99, round(100 * por))} of 100 tokens are repeats."
    if por < 0.1:
        return f"One of {round(1 / por)} tokens is a repeat."
    share = round(10 * por)  # 0.928 -> "9 of 10 tokens are repeats."
    return f"{share} of 10 tokens {'is a repeat' if share == 1 else 'are repeats'}."


def summary(subject: Subject, figures: Figures) -> list[str]:
    """Return one or two sentences each on sharing, on the part that a packing keeps, on groups, and on rewards."""
    return [
        _sharing(figures.totals),
        _packing(subject, figures),
        _groups(figures),
        *_rewards(figures),
    ]


def _sharing(totals: dict[str, Any]) -> str:
    flat, tree = totals["tokens_flat"], totals["tokens_tree"]
    return (
        f"{quantity(totals['num_trajectories'], 'rollout')} of {quantity(totals['num_groups'], 'group')} have "
        f"{flat:,} tokens. If every shared prefix is computed once, {tree:,} are left: "
        f"{percent(totals['por'])} could be saved (POR), {flat / tree:.1f} tokens for each one that is computed."
    )


def _packing(subject: Subject, figures: Figures) -> str:
    packed = subject.packed
    if packed is not None:
        totals = packed.totals
        return (
            f"The {quantity(totals['num_rows'], 'row')} of at most {packed.capacity:,} tokens contain "
            f"{totals['tokens_packed']:,}: {percent(totals['err'])} are saved (ERR). "
            f"Rows are {percent(totals['fill'])} full."
        )
    first, best = figures.capacities[0], max(figures.capacities, key=lambda point: float(point["err"]))
    text = f"Packed into rows of at most {first['capacity']:,} tokens, {percent(first['err'])} are saved (ERR)"
    # 0.1 %: a difference that percentages with one decimal show.
    if best["err"] > first["err"] + 0.001:
        text += f"; rows of {best['capacity']:,} save {percent(best['err'])}"
    return text + "."


def _groups(figures: Figures) -> str:
    groups, trees = figures.groups, figures.trees
    overlap = np.sort(groups.overlap)
    if len(overlap) == 1:
        return f"All rollouts belong to one group: {percent(float(overlap[0]))} of its tokens are repeats."
    low, middle, high = (percent(float(np.quantile(overlap, q))) for q in (0, 0.5, 1))
    inside = 1 - groups.tree.sum() / groups.flat.sum()
    text = f"Inside the groups, {percent(float(inside))} are repeats ({low} to {high}, median {middle})"
    between = figures.totals["por"] - inside
    # 0.5 %: less is not worth a sentence.
    if between > 0.005 and len(trees.names) < len(groups.names):
        text += f"; another {percent(float(between))} of all tokens are repeats between groups, such as a system prompt"
    return text + "."


def _rewards(figures: Figures) -> list[str]:
    if figures.mean_reward is None:
        return []
    text = f"The mean reward is {number(figures.mean_reward)}."
    if figures.groups_of_one_reward:
        text += (
            f" In {figures.groups_of_one_reward:,} of {quantity(len(figures.groups.names), 'group')} all rollouts have "
            "the same reward, so their advantages within the group are zero."
        )
    return [text]


def captions(subject: Subject, figures: Figures) -> dict[str, str]:
    """Return one sentence for each chart, by its name."""
    lengths, sizes = subject.trie.lengths, figures.groups.sizes
    planned = f"planned by the method {figures.method}"
    fill = "as packed" if subject.packed is not None else f"if packed at {figures.fill_capacity:,} tokens, {planned}"
    too_long = max(point["num_too_long"] for point in figures.capacities)
    left_out = f"; up to {quantity(too_long, 'rollout')} longer than a row left out" if too_long else ""
    return {
        "depths": "Share of repeated tokens by distance from the root; each range is twice as long as the one before.",
        "lengths": f"Tokens of a rollout: {_range(lengths)}.",
        "group_overlap": "Groups by the share of repeats among their own tokens.",
        "group_sizes": f"Rollouts in a group: {_range(sizes)}.",
        "capacities": "ERR, the share of tokens saved in rows of a given capacity, and POR (dashed), the share saved "
        f"in rows without a limit; {planned}{left_out}.",
        "fill": f"Rows by how full they are, {fill}.",
        "rewards": "Nodes by the depth of their first token and by the mean reward of the rollouts through them; a "
        "stronger colour means more tokens. If the middle is empty from some depth on, outcomes are decided there.",
    }


def _range(values: Int64) -> str:
    low, high, middle = int(values.min()), int(values.max()), float(np.median(values))
    return f"always {low:,}" if low == high else f"{low:,} to {high:,}, median {number(middle)}"


def percent(value: float) -> str:
    """Return a ratio as a percentage with one decimal and a blank at which no line breaks."""
    return f"{100 * value:.1f}\N{NO-BREAK SPACE}%"


def number(value: float) -> str:
    """Return a number with three significant digits, and whole numbers in full."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def quantity(count: int, noun: str) -> str:
    """Return `1 row`, `2 rows`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
