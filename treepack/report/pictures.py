"""The charts of a report as PNG files for papers, and the tree of the group that the page opens.

    ReportSubject, ReportFigures, PageContents --write_pictures--> rewards.png, overlap-by-depth.png, ..., tree.png

The same numbers as on the page, in its light colours, one file per chart; `tree_picture` draws the tree.
The same figures give the same bytes under one version of matplotlib, which is imported only when something is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from treepack.errors import TreepackError, install_hint
from treepack.files.directory import finished_file
from treepack.files.remote.address import AnyPath
from treepack.report.charts import short
from treepack.report.contents import PageContents
from treepack.report.figures import Record, ReportFigures, ReportSubject
from treepack.report.tree_picture import draw_tree
from treepack.report.words import percent, three_digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

# The colours of the page. Blue and orange differ for all common kinds of colour blindness.
_BLUE, _RED, _TEXT, _GREY, _RULE = "#2f7fd1", "#c2541b", "#1b2127", "#5b6672", "#dfe3e8"
_PALE = "#abcbec"
_FEW_TO_MANY = ("#dbe9f6", "#2f78c0", "#12365c")
_DPI = 300  # the usual minimum of journals
_SIZE = (4.2, 2.6)  # inches: a column of a paper
_TREE_SIZE = (7.0, 3.6)  # inches: its full width

Draw = Callable[["Axes", ReportSubject, ReportFigures], None]


def write_pictures(
    subject: ReportSubject,
    figures: ReportFigures,
    contents: PageContents,
    directory: AnyPath,
    *,
    overwrite: bool = False,
) -> list[AnyPath]:
    """Write a PNG file for each chart with data, and return their paths.

    Raises:
        TreepackError: matplotlib is not installed, or a file cannot be written.
    """
    from matplotlib import rc_context

    written: list[AnyPath] = []
    pictures = _PICTURES | {_TREE: partial(draw_tree, contents=contents)}
    for name, draw in pictures.items():
        if name in _OF_REWARDS and not figures.rewards:
            continue
        figure = _figure(subject, figures, draw, _TREE_SIZE if name == _TREE else _SIZE)
        output = finished_file(directory / name, overwrite=overwrite, option="--png")
        with output as temporary, rc_context({"hatch.linewidth": 0.5}):
            # By default, matplotlib writes its version into the file, which would change the bytes.
            figure.savefig(temporary, format="png", backend="agg", dpi=_DPI, metadata={"Software": None})
        written.append(directory / name)
    return written


def figure_class() -> type[Figure]:
    """Return matplotlib's class of pictures.

    Raises:
        TreepackError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TreepackError(f"pictures cannot be drawn ({error}); {install_hint('report')}") from error
    return Figure


def _figure(subject: ReportSubject, figures: ReportFigures, draw: Draw, size: tuple[float, float]) -> Figure:
    figure = figure_class()(figsize=size, facecolor="white", layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GREY)
    axes.tick_params(colors=_GREY, labelcolor=_TEXT, labelsize=8, length=3)
    axes.grid(axis="y", color=_RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    draw(axes, subject, figures)
    return figure


def _name(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, color=_TEXT, fontsize=9)
    axes.set_ylabel(y, color=_TEXT, fontsize=9)


def _percent(axes: Axes, *, of_y: bool) -> None:
    from matplotlib.ticker import PercentFormatter

    (axes.yaxis if of_y else axes.xaxis).set_major_formatter(PercentFormatter(1))


def _depths(axes: Axes, subject: ReportSubject, figures: ReportFigures) -> None:
    del subject
    each = np.arange(len(figures.depths))
    axes.bar(each, [record["por"] for record in figures.depths], 0.85, color=_BLUE, label="POR")
    if any("err" in record for record in figures.depths):
        err = [record.get("err", np.nan) for record in figures.depths]
        axes.plot(each, err, "_", color=_RED, markersize=14, markeredgewidth=2, label="ERR")
        axes.legend(frameon=False, fontsize=8, loc="upper right")
    axes.set_xticks(each, [short(record["end"]) for record in figures.depths])
    axes.set_ylim(0, 1)
    _percent(axes, of_y=True)
    _name(axes, "distance from the root up to, tokens", "repeated tokens")


def _bars(records: list[Record], x: str, y: str, *, share: bool = False, fine: bool = False) -> Draw:
    def draw(axes: Axes, subject: ReportSubject, figures: ReportFigures) -> None:
        del subject, figures
        starts = np.array([record["start"] for record in records])
        widths = np.array([record["end"] for record in records]) - starts
        # A bar for one number is centred on it: 7 is drawn from 6.5 to 7.5.
        centre = -0.5 if not share and not fine and (widths == 1).all() else 0.0
        counts = [record["count"] for record in records]
        axes.bar(starts + centre + 0.03 * widths, counts, 0.94 * widths, align="edge", color=_BLUE)
        axes.locator_params("y", integer=True)
        axes.locator_params("x", nbins=6, integer=not share and not fine)
        if share:
            axes.set_xlim(0, 1)
            _percent(axes, of_y=False)
        _name(axes, x, y)

    return draw


def _reward_counts(axes: Axes, subject: ReportSubject, figures: ReportFigures) -> None:
    records = figures.reward_counts
    if any(record["start"] != record["end"] for record in records):
        _bars(records, "reward", "rollouts", fine=True)(axes, subject, figures)
        return
    axes.bar(
        [three_digits(record["start"]) for record in records], [record["count"] for record in records], color=_BLUE
    )
    axes.locator_params("y", integer=True)
    _name(axes, "reward", "rollouts")


def _pass_rates(axes: Axes, subject: ReportSubject, figures: ReportFigures) -> None:
    del subject
    records = figures.pass_rates
    starts = np.array([record["start"] for record in records])
    widths = np.array([record["end"] for record in records]) - starts
    colours = [_BLUE if not record["is_one"] else _PALE for record in records]
    axes.bar(starts, [record["rate"] for record in records], 0.94 * widths, align="edge", color=colours)
    axes.set_xlim(0, 1)
    _percent(axes, of_y=False)
    if figures.is_pass_or_fail:
        axes.set_ylim(0, 1)
        _percent(axes, of_y=True)
    _name(axes, "groups, in order; pale: one outcome", "pass rate" if figures.is_pass_or_fail else "mean reward")


def _lengths(axes: Axes, subject: ReportSubject, figures: ReportFigures) -> None:
    _bars(figures.lengths, "tokens of a sample", "samples")(axes, subject, figures)


def _group_overlap(axes: Axes, subject: ReportSubject, figures: ReportFigures) -> None:
    _bars(figures.group_overlap, "overlap of a group", "groups", share=True)(axes, subject, figures)


def _group_sizes(axes: Axes, subject: ReportSubject, figures: ReportFigures) -> None:
    _bars(figures.group_sizes, "rollouts of a group", "groups")(axes, subject, figures)


def _fill(axes: Axes, subject: ReportSubject, figures: ReportFigures) -> None:
    _bars(figures.fill, f"fill of a row of {figures.fill_capacity:,} tokens", "rows", share=True)(
        axes, subject, figures
    )


def _capacities(axes: Axes, subject: ReportSubject, figures: ReportFigures) -> None:
    del subject
    records, por = figures.capacities, figures.totals["por"]
    x, y = [record["capacity"] for record in records], [record["err"] for record in records]
    axes.axhline(por, color=_RED, linestyle="--", linewidth=1.5, label=f"POR {percent(por)}")
    axes.plot(x, y, "o-", color=_BLUE, linewidth=1.8, markersize=4.5, label="ERR")
    real = [record for record in records if record["measured"]]
    if real:
        places = [record["capacity"] for record in real], [record["err"] for record in real]
        axes.plot(*places, "D", color=_BLUE, markersize=8, label="ERR as packed")
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [short(capacity) for capacity in x])
    axes.minorticks_off()  # a logarithmic axis would label them besides the capacities
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    _percent(axes, of_y=True)
    _name(axes, "tokens of a row", "saved tokens")


def _rewards(axes: Axes, subject: ReportSubject, figures: ReportFigures) -> None:
    del subject
    from matplotlib.collections import PatchCollection
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Rectangle

    records = figures.rewards
    cells = [
        Rectangle(
            (record["depth_start"], record["reward_start"]),
            record["depth_end"] - record["depth_start"],
            record["reward_end"] - record["reward_start"],
        )
        for record in records
    ]
    tokens = np.array([record["tokens"] for record in records])
    patches = PatchCollection(
        cells, cmap=_colours(_FEW_TO_MANY), norm=LogNorm(1, max(2, tokens.max())), edgecolor="white"
    )
    patches.set_array(tokens)
    axes.add_collection(patches)
    axes.autoscale_view()
    bar = axes.figure.colorbar(patches, ax=axes)
    bar.set_label("tokens", color=_TEXT, fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    _name(axes, "node begins at, tokens", "mean reward")


def _colours(stops: tuple[str, ...]) -> Colormap:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("treepack", stops)


_TREE = "tree.png"
_OF_REWARDS = ("rewards.png", "pass-rates.png", "reward-by-node.png")
_PICTURES: dict[str, Draw] = {
    "rewards.png": _reward_counts,
    "pass-rates.png": _pass_rates,
    "overlap-by-depth.png": _depths,
    "lengths.png": _lengths,
    "group-overlap.png": _group_overlap,
    "group-sizes.png": _group_sizes,
    "fill.png": _fill,
    "capacities.png": _capacities,
    "reward-by-node.png": _rewards,
}
PICTURES = (*_PICTURES, _TREE)
