"""Options of statistics and of the report.

This file imports no numerical library, so that the command line can take its defaults from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from treepack.files.remote.address import AnyPath
from treepack.ingest.options import BuildOptions
from treepack.option_fields import option
from treepack.pack.options import PackOptions


@dataclass(frozen=True, slots=True)
class StatsOptions:
    """Options of `treepack stats`."""

    build: BuildOptions = field(default_factory=BuildOptions)  # how raw rollouts are read
    # Method, effort, time limit and balance of the plans; its other fields are not used.
    pack: PackOptions = field(default_factory=lambda: PackOptions(effort="low"))
    check: bool = option(False, "Verify hashes, every invariant, and that rows contain all of the trie.")
    trie: AnyPath | None = option(
        None, "Trie to check a packed directory against; default: the one it was packed from."
    )
    capacities: tuple[int, ...] = option(
        (),
        "Capacities to compare; longer trajectories are left out and counted. Default: powers of two from the longest "
        "trajectory to whole trees, by quick plans.",
    )
    model: str = option(
        "qwen3-8b", "Model that is trained: a preset or a config.json; docs/forecast.md lists the presets."
    )
    device: str = option("h200", "GPU that trains it: a100, h100, h200, b200, or its rate in TFLOP/s in bfloat16.")
    carry: int | None = option(
        None,
        "Forecast for train --carry N; default: the largest power of two from 4096 to 65536 that fits the device.",
        minimum=1,
    )


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Options of `treepack report`."""

    # How raw rollouts are read; its tokenizer also decodes token ids.
    build: BuildOptions = field(default_factory=BuildOptions)
    # Capacities at which ERR is compared with POR; empty for powers of two that every rollout fits.
    capacities: tuple[int, ...] = ()
    # Method, effort and time limit of the plans; its other fields are not used.
    pack: PackOptions = field(default_factory=lambda: PackOptions(effort="low"))
    model: str = "qwen3-8b"  # model of the forecast: a preset or a config.json
    # Trie of a packed directory; None for the one it was packed from, or else one rebuilt from its rows.
    trie: AnyPath | None = None
    text: bool = True  # put the text of the rollouts into the page
    # Maximum number of tokens shown as text; every node shows the same number of its first tokens.
    text_limit: int = 8_000_000
