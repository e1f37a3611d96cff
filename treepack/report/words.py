"""A report in sentences: the summary that a reader sees before any chart.

ReportFigures, ReportSubject --headline, report_summary, captions--> plain text
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treepack.analysis.summary import quantity
from treepack.analysis.verdict import gain_headline
from treepack.report.causes import LostSharing
from treepack.report.figures import ReportFigures, ReportSubject
from treepack.trajectory import Int64

CAUSES = {
    "retokenisation": "The texts are equal, but their tokens are not: text was tokenised again. Record token ids.",
    "whitespace": "Only blanks or line breaks differ. Write prompts with the same code everywhere.",
    "random ids": "Only ids, dates or times differ. --normalize-ids numbers the ids of conversations.",
    "template": "Only reasoning differs: the chat template drops or adds it in earlier turns. A template that keeps "
    "the history avoids it (--chat-template).",
    "prompt edit": "Most words are the same: a line of the prompt differs. Put text that changes at its end.",
    "other prompt": "The prompts are different texts, for example because a simulated user wrote them.",
    "rewritten history": "The next call does not continue the call before: the history was compacted or shortened.",
    "prompt differs": "Prompts of one group differ. A tokenizer distinguishes the causes (--tokenizer).",
    "history differs": "A call does not continue the one before. A tokenizer distinguishes the causes (--tokenizer).",
    "not read": "The texts of these places were not read, because the other ones cost more.",
}


def lost_sentence(sharing: LostSharing, tokens_tree: int) -> str:
    """Return the number of stored tokens that should have been shared, and of trajectories that were not compared."""
    lost, places = sharing.reasons["lost"], sum(cause.num_places for cause in sharing.causes)
    if lost:
        text = (
            f"{lost:,} of {tokens_tree:,} stored tokens ({percent(lost / tokens_tree)}) should have been shared with "
            f"another trajectory of the group, at {quantity(places, 'place')}."
        )
        if behind := sharing.reasons["behind"]:
            text += f" After these places are {behind:,} more tokens, which could not be shared either."
    else:
        text = "Nothing is lost: trajectories of a group share their whole prompts, and calls continue each other."
    if sharing.num_alone:
        alone = f"{quantity(sharing.num_alone, 'trajectory')} {'is' if sharing.num_alone == 1 else 'are'}"
        text += f" {alone} alone in the group, and compared with none."
    return text


def headline(figures: ReportFigures) -> str:
    """Return the gain against the baseline of the verdict as a sentence, the same as that of `stats`."""
    return f"{gain_headline(figures.forecast['gain'])}."


def gain(figures: ReportFigures) -> str:
    """Return the baseline of the headline, and the gains against the others."""
    entry = figures.forecast["gain"]
    if figures.forecast["pays"]:
        usual = ", as most trainers make them" if entry["baseline"] == "append_only" else ""
        text = f"Against {entry['label']}{usual}."
    else:
        saved = 1 - 1 / entry["speedup"]
        text = f"It computes {percent(abs(saved))} {'less' if saved >= 0 else 'more'} than {entry['label']}."
    others = [
        f"{other['speedup']:.1f}x against {other['label']}"
        for other in figures.forecast["baselines"]
        if other["baseline"] != entry["baseline"]
    ]
    return text + (f" And {' and '.join(others)}." if others else "")


def report_summary(subject: ReportSubject, figures: ReportFigures) -> list[str]:
    """Return one or two sentences each on sharing, the part that a packing keeps, long rows, groups, and rewards."""
    return [
        _sharing(figures.totals),
        _packing(subject, figures),
        *_memory(figures),
        _groups(figures),
        *_rewards(figures),
    ]


def _sharing(totals: dict[str, Any]) -> str:
    flat, tree = totals["tokens_flat"], totals["tokens_tree"]
    return (
        f"{quantity(totals['num_trajectories'], 'trajectory')} of {quantity(totals['num_groups'], 'group')} have "
        f"{flat:,} tokens. If every shared prefix is computed once, {tree:,} are left: "
        f"{percent(totals['por'])} of the tokens are repeats (POR)."
    )


def _packing(subject: ReportSubject, figures: ReportFigures) -> str:
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


def _memory(figures: ReportFigures) -> list[str]:
    sentence, is_known = figures.forecast["memory"], figures.forecast["capacities"][0]["num_bytes"] is not None
    return [] if sentence is None else [f"Memory: {sentence}{' (an estimate)' if is_known else ''}."]


def _groups(figures: ReportFigures) -> str:
    groups, trees = figures.groups, figures.trees
    overlap = np.sort(groups.overlap)
    if len(overlap) == 1:
        return f"All trajectories belong to one group: {percent(float(overlap[0]))} of its tokens are repeats."
    low, middle, high = (percent(float(np.quantile(overlap, q))) for q in (0, 0.5, 1))
    inside = 1 - groups.tree.sum() / groups.flat.sum()
    text = f"Inside the groups, {percent(float(inside))} are repeats ({low} to {high}, median {middle})"
    between = figures.totals["por"] - inside
    # 0.5 %: less is not worth a sentence.
    if between > 0.005 and len(trees.names) < len(groups.names):
        text += f"; another {percent(float(between))} of all tokens are repeats between groups, such as a system prompt"
    return text + "."


def _rewards(figures: ReportFigures) -> list[str]:
    known = figures.rollouts.reward[~np.isnan(figures.rollouts.reward)]
    if not len(known):
        return []
    kind = "pass rate" if figures.is_pass_or_fail else "mean reward"
    value = percent(float(known.mean())) if figures.is_pass_or_fail else three_digits(float(known.mean()))
    text = f"The {kind} of the rollouts is {value}."
    if same := int(figures.group_outcomes.is_one.sum()):
        groups = quantity(len(figures.groups.names), "group")
        text += f" In {same:,} of {groups} all rollouts have the same reward, so their advantages there are zero."
    return [text]


def captions(subject: ReportSubject, figures: ReportFigures) -> dict[str, str]:
    """Return one sentence for each chart, by its name."""
    lengths, sizes = subject.trie.lengths, figures.group_outcomes.num_rollouts
    planned = f"planned by the method {figures.method}"
    fill = "as packed" if subject.packed is not None else f"if packed at {figures.fill_capacity:,} tokens, {planned}"
    too_long = max(point["num_too_long"] for point in figures.capacities)
    left_out = f"; up to {quantity(too_long, 'trajectory')} longer than a row left out" if too_long else ""
    return {
        "depths": "Share of repeated tokens by distance from the root; each range is twice as long as the one before.",
        "lengths": f"Tokens of a trajectory: {_range(lengths)}.",
        "group_overlap": "Groups by the share of repeats among their own tokens.",
        "group_sizes": f"Rollouts in a group: {_range(sizes)}.",
        "capacities": "ERR, the share of tokens saved in rows of a given capacity, and POR (dashed), the share saved "
        f"in rows without a limit; {planned}{left_out}.",
        "fill": f"Rows by how full they are, {fill}.",
        "rewards": "Nodes by the depth of their first token and by the mean reward of the trajectories through them; a "
        "stronger colour means more tokens. If the middle is empty from some depth on, outcomes are decided there.",
        "reward_counts": "Rollouts by their reward.",
        "pass_rates": f"Groups in the order of their {'pass rate' if figures.is_pass_or_fail else 'mean reward'}. Pale "
        "bars have one outcome only, so they train nothing with advantages within the group.",
    }


def _range(values: Int64) -> str:
    low, high, middle = int(values.min()), int(values.max()), float(np.median(values))
    return f"always {low:,}" if low == high else f"{low:,} to {high:,}, median {three_digits(middle)}"


def percent(value: float) -> str:
    """Return a ratio as a percentage with one decimal and a blank at which no line breaks."""
    return f"{100 * value:.1f}\N{NO-BREAK SPACE}%"


def three_digits(value: float) -> str:
    """Return a number with three significant digits, and whole numbers in full."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def printable(text: str) -> str:
    """Return a text with blanks in place of control characters, which XML and so SVG cannot contain."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
