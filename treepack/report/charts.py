"""The charts of a page as Vega-Lite specifications, with the colours of the page's CSS variables.

    ReportFigures --charts--> ReportChart(name, title, wide, spec, header, lines), ...

The browser draws the charts as SVG with ARIA labels. `header` and `lines` are the same numbers as a table, for readers
who cannot see a chart or prefer a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treepack.errors import TreepackError, install_hint
from treepack.report.figures import Record, ReportFigures
from treepack.report.words import percent, three_digits

Spec = dict[str, Any]

FONT = "system-ui, sans-serif"  # named, because Vega measures texts in a canvas, which cannot inherit a font
_HEIGHT = 210  # pixels: two rows of charts on a usual screen
DATA, SECOND = "var(--data)", "var(--second)"
MORE = tuple(f"var(--{name})" for name in ("assistant", "tool", "user", "system", "differs"))
_PERCENT = {"format": ".0%", "values": [0, 0.25, 0.5, 0.75, 1]}


@dataclass(frozen=True, slots=True)
class ReportChart:
    """One chart; a `wide` chart takes two columns of the page."""

    name: str
    title: str
    spec: Spec
    header: tuple[str, ...]
    lines: Sequence[tuple[str, ...]]
    wide: bool = False


def renderer() -> Any:
    """Return the module vl_convert, which contains Vega and makes PNG files of charts.

    Raises:
        TreepackError: vl-convert-python is not installed.
    """
    try:
        import vl_convert
    except ImportError as error:
        raise TreepackError(f"charts cannot be drawn ({error}); {install_hint('report')}") from error
    return vl_convert


def charts(figures: ReportFigures) -> list[ReportChart]:
    """Return all charts with data, in the order of the page."""
    rewards = [_reward_counts(figures), _pass_rates(figures)] if figures.rewards else []
    fill = f"Fill of rows of {figures.fill_capacity:,} tokens"
    result = [
        *rewards,
        _depths(figures),
        _histogram("lengths", "Length of trajectories", figures.lengths, "tokens", "trajectories"),
        _histogram("group_overlap", "Overlap of groups", figures.group_overlap, "overlap", "groups", share=True),
        _histogram("group_sizes", "Size of groups", figures.group_sizes, "rollouts", "groups"),
        _histogram("fill", fill, figures.fill, "fill", "rows", share=True),
        _capacities(figures),
    ]
    return [*result, _rewards(figures)] if figures.rewards else result


def _depths(figures: ReportFigures) -> ReportChart:
    records = [record | {"range": f"{_short(record['start'])}-{_short(record['end'])}"} for record in figures.depths]
    packed = any("err" in record for record in records)
    x: Spec = {"field": "range", "type": "ordinal", "sort": None, "title": "distance from the root, tokens"}
    x |= {"axis": {"labelAngle": 0, "labelOverlap": True}}
    tooltip: list[Spec] = [
        {"field": "range", "title": "depth"},
        {"field": "tokens_flat", "title": "tokens, one by one", "format": ","},
        {"field": "tokens_tree", "title": "tokens, shared once", "format": ","},
        {"field": "por", "title": "POR", "format": ".1%"},
    ]
    tooltip += [{"field": "err", "title": "ERR", "format": ".1%"}] if packed else []
    y: Spec = {"type": "quantitative", "scale": {"domain": [0, 1]}, "axis": _PERCENT, "title": "repeated tokens"}
    bars = {"mark": {"type": "bar", "color": DATA, "cornerRadiusEnd": 2}, "encoding": {"y": {"field": "por", **y}}}
    # ERR as a tick across the bar of POR: the part of the bar above the tick is lost by packing.
    ticks = {
        "mark": {"type": "tick", "color": SECOND, "thickness": 3},
        "encoding": {"y": {"field": "err", **y}},
    }
    layers = [bars, ticks] if packed else [bars]
    lines = [
        (record["range"], f"{record['tokens_flat']:,}", f"{record['tokens_tree']:,}", percent(record["por"]))
        + ((percent(record["err"]) if "err" in record else "",) if packed else ())
        for record in records
    ]
    header = ("depth", "tokens, one by one", "shared once", "POR", *(("ERR",) if packed else ()))
    title = "Overlap by depth" + (": POR as bars, ERR as ticks" if packed else "")
    spec: Spec = {"encoding": {"x": x, "tooltip": tooltip}, "layer": layers}
    return ReportChart("depths", title, _spec(title, records, spec), header, lines, wide=True)


def _histogram(
    name: str, title: str, records: list[Record], of: str, noun: str, *, share: bool = False, fine: bool = False
) -> ReportChart:
    form = ".0%" if share else ".3~g" if fine else ","
    x: Spec = {"field": "start", "type": "quantitative", "bin": {"binned": True}, "title": of}
    x |= {"axis": {"format": "~g" if fine else "~s", "tickCount": 5, "labelOverlap": True}}
    if share:
        x |= {"scale": {"domain": [0, 1]}, "axis": _PERCENT}
    each = all(record["end"] - record["start"] == 1 for record in records) and not share and not fine
    if each:  # a bar for each number, labelled in its middle
        labels = {"labelAngle": 0, "labelOverlap": True, "labelSeparation": 8}
        x = {"field": "start", "type": "ordinal", "title": of, "axis": labels}
    y: Spec = {"field": "count", "type": "quantitative", "title": noun, "axis": _count_axis(records)}
    tooltip: list[Spec] = [
        {"field": "start", "title": of if each else f"{of} from", "format": form},
        *([] if each else [{"field": "end", "title": "to", "format": form}]),
        {"field": "count", "title": noun, "format": ","},
    ]
    spec: Spec = {
        "mark": {"type": "bar", "color": DATA, "binSpacing": 1},
        "encoding": {"x": x, **({} if each else {"x2": {"field": "end"}}), "y": y, "tooltip": tooltip},
    }
    text = percent if share else three_digits
    lines = [
        (text(r["start"]) if each else f"{text(r['start'])} to {text(r['end'])}", f"{r['count']:,}")
        for r in records
        if r["count"]
    ]
    return ReportChart(name, title, _spec(title, records, spec), (of, noun), lines)


def _count_axis(records: list[Record]) -> Spec:
    # Counts below six get a tick each, because Vega would put ticks at fractions.
    max_count = max(record["count"] for record in records)
    return {"values": list(range(max_count + 1)), "format": "d"} if max_count < 6 else {"format": "~s", "tickCount": 5}


def _capacities(figures: ReportFigures) -> ReportChart:
    por = figures.totals["por"]
    records = [record | {"row": _short(record["capacity"])} for record in figures.capacities]
    # The axis begins below the smallest ERR and ends above POR, at tenths: ERR 0.52 to 0.6, POR 0.63 -> [0.4, 0.7]
    bottom = min(0.95 * min(record["err"] for record in records), 0.9)
    domain = [max(0, int(10 * bottom) / 10), min(1, (int(10 * por) + 1) / 10)]
    x: Spec = {"field": "row", "type": "ordinal", "sort": None, "title": "capacity, tokens of a row"}
    x |= {"axis": {"labelAngle": 0, "labelOverlap": True}, "scale": {"type": "point"}}
    y: Spec = {"field": "err", "type": "quantitative", "title": "saved tokens", "scale": {"domain": domain}}
    y |= {"axis": {"format": ".0%", "tickCount": 5}}
    tooltip: list[Spec] = [
        {"field": "capacity", "format": ","},
        {"field": "err", "title": "ERR", "format": ".1%"},
        {"field": "num_rows", "title": "rows", "format": ","},
        {"field": "fill", "title": "fill", "format": ".1%"},
    ]
    # The capacity of a packed directory is a large diamond, planned capacities are small circles.
    shape = {"condition": {"test": "datum.measured", "value": "diamond"}, "value": "circle"}
    size = {"condition": {"test": "datum.measured", "value": 170}, "value": 60}
    title = f"ERR across capacities; dashed: POR {percent(por)}"
    spec: Spec = {
        "layer": [
            {
                "data": {"values": [{"por": por}]},
                "mark": {"type": "rule", "color": SECOND, "strokeDash": [6, 4], "strokeWidth": 2},
                "encoding": {"y": y | {"field": "por"}},
            },
            {"mark": {"type": "line", "color": DATA, "strokeWidth": 2}, "encoding": {"x": x, "y": y}},
            {
                "mark": {"type": "point", "color": DATA, "filled": True, "opacity": 1},
                "encoding": {"x": x, "y": y, "shape": shape, "size": size, "tooltip": tooltip},
            },
        ]
    }
    header = ("capacity", "ERR", "rows", "fill", "")
    lines = [
        (f"{r['capacity']:,}", percent(r["err"]), f"{r['num_rows']:,}", percent(r["fill"]), _note(r)) for r in records
    ]
    return ReportChart("capacities", title, _spec(title, records, spec), header, lines, wide=not figures.rewards)


def _note(record: Record) -> str:
    if record["measured"]:
        return "as packed"
    return f"{record['num_too_long']:,} trajectories too long" if record["num_too_long"] else ""


def _rewards(figures: ReportFigures) -> ReportChart:
    records = figures.rewards
    x: Spec = {"field": "depth_start", "type": "quantitative", "title": "node begins at, tokens"}
    x |= {"axis": {"format": "~s", "tickCount": 8, "labelOverlap": True}}
    y: Spec = {"field": "reward_start", "type": "quantitative", "title": "mean reward", "scale": {"zero": False}}
    max_tokens = max(record["tokens"] for record in records)
    tooltip: list[Spec] = [
        {"field": "depth_start", "title": "depth from", "format": ","},
        {"field": "depth_end", "title": "to", "format": ","},
        {"field": "reward_start", "title": "reward from", "format": ".3g"},
        {"field": "reward_end", "title": "to", "format": ".3g"},
        {"field": "nodes", "format": ","},
        {"field": "tokens", "format": ","},
    ]
    # Opacity by the logarithm of the tokens; 0.12, because a cell of one token must still be visible.
    scale = {"type": "log", "domain": [1, max(2, max_tokens)], "range": [0.12, 1]}
    spec: Spec = {
        "mark": {"type": "rect", "color": DATA, "stroke": "var(--card)", "strokeWidth": 1},
        "encoding": {
            "x": x,
            "x2": {"field": "depth_end"},
            "y": y,
            "y2": {"field": "reward_end"},
            "tooltip": tooltip,
            "opacity": {"field": "tokens", "type": "quantitative", "scale": scale, "legend": None},
        },
    }
    lines = [
        (
            f"{three_digits(r['depth_start'])} to {three_digits(r['depth_end'])}",
            f"{three_digits(r['reward_start'])} to {three_digits(r['reward_end'])}",
            f"{r['nodes']:,}",
            f"{r['tokens']:,}",
        )
        for r in records
    ]
    title = "Reward by node"
    header = ("depth", "mean reward", "nodes", "tokens")
    return ReportChart("rewards", title, _spec(title, records, spec), header, lines, wide=True)


def _reward_counts(figures: ReportFigures) -> ReportChart:
    records = figures.reward_counts
    if any(record["start"] != record["end"] for record in records):
        return _histogram("reward_counts", "Rewards of rollouts", records, "reward", "rollouts", fine=True)
    records = [record | {"reward": three_digits(record["start"])} for record in records]
    tooltip = [{"field": "reward"}, {"field": "count", "title": "rollouts", "format": ","}]
    x = {"field": "reward", "type": "ordinal", "sort": None, "title": "reward", "axis": {"labelAngle": 0}}
    y = {"field": "count", "type": "quantitative", "title": "rollouts", "axis": _count_axis(records)}
    spec: Spec = {
        "mark": {"type": "bar", "color": DATA, "width": {"band": 0.7}, "cornerRadiusEnd": 2},
        "encoding": {"x": x, "y": y, "tooltip": tooltip},
    }
    lines = [(record["reward"], f"{record['count']:,}") for record in records]
    title = "Rewards of rollouts"
    return ReportChart("reward_counts", title, _spec(title, records, spec), ("reward", "rollouts"), lines)


def _pass_rates(figures: ReportFigures) -> ReportChart:
    records = figures.pass_rates
    is_rate = figures.is_pass_or_fail
    noun = "pass rate" if is_rate else "mean reward"
    # A bar from 0 % to 2 % of the groups for each of 50 groups; the groups are in ascending order.
    x: Spec = {
        "field": "start",
        "type": "quantitative",
        "title": "groups, in order; pale: one outcome",
        "bin": {"binned": True},
    }
    x |= {"axis": _PERCENT, "scale": {"domain": [0, 1]}}
    y: Spec = {"field": "rate", "type": "quantitative", "title": noun}
    y |= {"axis": _PERCENT, "scale": {"domain": [0, 1]}} if is_rate else {"axis": {"tickCount": 5}}
    tooltip = [
        {"field": "name", "title": "group"},
        {"field": "rate", "title": noun, "format": ".1%" if is_rate else ".3~g"},
    ]
    # A group in which all fail has a bar of no height; a line below the axis shows that it is there.
    opacity = {"condition": {"test": "datum.is_one", "value": 0.4}, "value": 1}
    spec: Spec = {
        "mark": {"type": "bar", "color": DATA, "binSpacing": 1, "minBandSize": 1},
        "encoding": {"x": x, "x2": {"field": "end"}, "y": y, "opacity": opacity, "tooltip": tooltip},
    }
    text = percent if is_rate else three_digits
    lines = [(r["name"], text(r["rate"]), "one outcome" if r["is_one"] else "") for r in records]
    title = f"{noun.capitalize()} by group"
    return ReportChart("pass_rates", title, _spec(title, records, spec), ("group", noun, ""), lines, wide=True)


def _spec(title: str, records: list[Record], spec: Spec) -> Spec:
    return framed(title, {"data": {"values": records}, **spec})


def framed(title: str, spec: Spec) -> Spec:
    """Return a specification with the size, the axes and the fonts of the page."""
    axis = {
        "domainColor": "var(--line)",
        "gridColor": "var(--line)",
        "tickColor": "var(--line)",
        "labelColor": "var(--muted)",
        "titleColor": "var(--muted)",
        "titleFontWeight": "normal",
        "titlePadding": 8,
        "labelFontSize": 11,
        "titleFontSize": 11.5,
        "labelFont": FONT,
        "titleFont": FONT,
    }
    config = {"axis": axis, "axisX": {"grid": False}, "view": {"stroke": None}, "background": "transparent"}
    config |= {"text": {"font": FONT, "fontSize": 12}}
    config |= {"legend": {"labelColor": "var(--muted)", "titleColor": "var(--muted)", "labelFont": FONT}}
    # The page sets the width; Vega fits the axes into it.
    size = {"width": "container", "height": _HEIGHT, "autosize": {"type": "fit-x", "contains": "padding"}}
    return {"description": title, **size, **spec, "config": config}


def _short(value: int) -> str:
    """Return a count of tokens for an axis: 256, 4k for 4,096, 1.5M."""
    # Multiples of 1,024 count in binary thousands, others in decimal ones: 4,096 -> 4k, 4,000 -> 4k, 1 << 20 -> 1M
    if value >= 10**6:
        return f"{value / 2**20 if value % 2**20 == 0 else value / 10**6:.3g}M"
    if value >= 1000:
        return f"{value // 1024}k" if value % 1024 == 0 else f"{value / 1000:.3g}k"
    return str(value)
