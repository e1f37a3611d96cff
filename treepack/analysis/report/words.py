"""A report in sentences: what a reader takes away before looking at any chart.

Figures, Subject --headline, summary, captions--> plain text
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treepack.analysis.report.figures import Figures, Subject
from treepack.trajectory import Int64

HARDLY = 0.02


def headline(por: float) -> str:
    """The share of repeated tokens as a sentence."""
    if por <= 0:
        return "No token is a repeat."
    if por < HARDLY:
        return "Hardly any token is a repeat."
    if por >= 0.95:
        return f"{min(99, round(100 * por))} of 100 tokens are repeats."
    if por < 0.1:
        return f"One of {round(1 / por)} tokens is a repeat."
    share = round(10 * por)
    return f"{share} of 10 tokens {'is a repeat' if share == 1 else 'are repeats'}."


def summary(subject: Subject, figures: Figures) -> list[str]:
    """What is shared, what a packing keeps of it, where it lies, and what the rewards say; one sentence or two each."""
    return [
        _sharing(figures.totals),
        _packing(subject, figures),
        _groups(figures),
        *_rewards(figures),
    ]


def _sharing(totals: dict[str, Any]) -> str:
    flat, tree = totals["tokens_flat"], totals["tokens_tree"]
    return (
        f"{counted(totals['num_trajectories'], 'rollout')} of {counted(totals['num_groups'], 'group')} have "
        f"{flat:,} tokens. With every shared prefix laid out once, {tree:,} are left: "
        f"{percent(totals['por'])} could be saved (POR), {flat / tree:.1f} tokens for each one that is computed."
    )


def _packing(subject: Subject, figures: Figures) -> str:
    packed = subject.packed
    if packed is not None:
        totals = packed.totals
        return (
            f"The {counted(totals['num_rows'], 'row')} of at most {packed.capacity:,} tokens hold "
            f"{totals['tokens_packed']:,}: {percent(totals['err'])} are saved (ERR). "
            f"Rows are {percent(totals['fill'])} full."
        )
    first, best = figures.capacities[0], max(figures.capacities, key=lambda point: float(point["err"]))
    text = f"Packed into rows of at most {first['capacity']:,} tokens, {percent(first['err'])} are saved (ERR)"
    if best["err"] > first["err"] + 0.001:
        text += f"; rows of {best['capacity']:,} save {percent(best['err'])}"
    return text + "."


def _groups(figures: Figures) -> str:
    groups, trees = figures.groups, figures.trees
    overlap = np.sort(groups.overlap)
    if len(overlap) == 1:
        return f"All rollouts are of one group, whose tokens are to {percent(float(overlap[0]))} repeats."
    low, middle, high = (percent(float(np.quantile(overlap, q))) for q in (0, 0.5, 1))
    inside = 1 - groups.tree.sum() / groups.flat.sum()
    text = f"Inside the groups {percent(float(inside))} are repeats ({low} to {high}, median {middle})"
    between = figures.totals["por"] - inside
    if between > 0.005 and len(trees.names) < len(groups.names):
        text += f"; another {percent(float(between))} of all tokens repeat what other groups have, a system prompt say"
    return text + "."


def _rewards(figures: Figures) -> list[str]:
    if figures.mean_reward is None:
        return []
    told = f"The mean reward is {number(figures.mean_reward)}."
    if figures.groups_of_one_reward:
        told += (
            f" In {figures.groups_of_one_reward:,} of {counted(len(figures.groups.names), 'group')} all rollouts have "
            "the same reward, so advantages within the group are zero there."
        )
    return [told]


def captions(subject: Subject, figures: Figures) -> dict[str, str]:
    """One sentence under each chart, by its name."""
    lengths, sizes = subject.trie.lengths, figures.groups.sizes
    planned = f"planned by the method {figures.method}"
    fill = "as packed" if subject.packed is not None else f"if packed at {figures.fill_capacity:,} tokens, {planned}"
    too_long = max(point["num_too_long"] for point in figures.capacities)
    left_out = f"; up to {counted(too_long, 'rollout')} longer than a row left out" if too_long else ""
    return {
        "depths": "Share of the tokens at each distance from the root that repeat a shared prefix; "
        "each range is twice as long as the one before.",
        "lengths": f"Tokens of a rollout: {_range(lengths)}.",
        "group_overlap": "Groups by the share of their own tokens that are repeats.",
        "group_sizes": f"Rollouts in a group: {_range(sizes)}.",
        "capacities": "ERR, what rows of a given capacity save, against POR (dashed), what rows without a limit "
        f"would save; {planned}{left_out}.",
        "fill": f"Rows by how full they are, {fill}.",
        "rewards": "Where nodes begin and the mean reward of the rollouts through them; stronger where there are more "
        "tokens. Outcomes are decided where the middle empties.",
    }


def _range(values: Int64) -> str:
    low, high, middle = int(values.min()), int(values.max()), float(np.median(values))
    return f"always {low:,}" if low == high else f"{low:,} to {high:,}, median {number(middle)}"


def percent(value: float) -> str:
    """A ratio as a percentage with one decimal, never broken across lines."""
    return f"{100 * value:.1f}\N{NO-BREAK SPACE}%"


def number(value: float) -> str:
    """Three significant digits, without an exponent where none is needed."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def counted(count: int, noun: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
