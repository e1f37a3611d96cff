"""Options of statistics and of the report.

This file imports no numerical library, so that the command line can take its defaults from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from treepack.files.remote.address import AnyPath
from treepack.ingest.options import BuildOptions
from treepack.option_fields import read_counts
from treepack.pack.options import PackOptions


@dataclass(frozen=True, slots=True)
class StatsOptions:
    """Options of `treepack stats`."""

    build: BuildOptions = field(default_factory=BuildOptions)  # how raw rollouts are read
    # Capacities to plan rows and forecast for; empty for a quick forecast at usual ones.
    capacities: tuple[int, ...] = ()
    # Method, effort and time limit of the plans for `capacities`; its other fields are not used.
    pack: PackOptions = field(default_factory=lambda: PackOptions(effort="low"))
    model: str = "qwen3-8b"  # model of the forecast: a preset or a config.json
    device: str = "h200"  # device of the forecast: a name or a rate in TFLOP/s
    # Tokens of a piece of the forecast for `train --carry`; None for the largest power of two that fits.
    carry: int | None = None
    check: bool = False  # verify hashes, every invariant, and that rows contain all of their trie
    trie: AnyPath | None = None  # trie to check a packed directory against; None for the one it was packed from

    def __post_init__(self) -> None:
        """Read texts such as "4k", and refuse other values that are not numbers of tokens."""
        read_counts(self, "capacities", "carry")


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

    def __post_init__(self) -> None:
        """Read texts such as "4k", and refuse other values that are not numbers of tokens."""
        read_counts(self, "capacities")
