"""Options of statistics and of the report.

This file imports no numerical library, so that the command line can take its defaults from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from treepack.files.remote.address import AnyPath
from treepack.ingest.options import BuildOptions
from treepack.pack.options import PackOptions


@dataclass(frozen=True, slots=True)
class StatsOptions:
    """Options of `treepack stats`.

    Attributes:
        build: how raw rollouts are read.
        capacities: capacities to plan rows and forecast for; empty for a quick forecast at usual ones.
        pack: method, effort and time limit of the plans for `capacities`; its other fields are not used.
        model: model of the forecast: a preset or a config.json.
        device: device of the forecast: a name or a rate in TFLOP/s.
        carry: tokens of a piece of the forecast for `train --carry`; None for the largest power of two that fits.
        check: verify hashes, every invariant, and that rows contain all of their trie.
        trie: trie to check a packed directory against; None for the one it was packed from.
    """

    build: BuildOptions = field(default_factory=BuildOptions)
    capacities: tuple[int, ...] = ()
    pack: PackOptions = field(default_factory=lambda: PackOptions(effort="low"))
    model: str = "qwen3-8b"
    device: str = "h200"
    carry: int | None = None
    check: bool = False
    trie: AnyPath | None = None


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Options of `treepack report`.

    Attributes:
        build: how raw rollouts are read; its tokenizer also decodes token ids.
        capacities: capacities at which ERR is compared with POR; empty for powers of two that every rollout fits.
        pack: method, effort and time limit of the plans; its other fields are not used.
        model: model of the forecast: a preset or a config.json.
        trie: trie of a packed directory; None for the one it was packed from, or else one rebuilt from its rows.
        text: put the text of the rollouts into the page.
        text_limit: maximum number of tokens shown as text; every node shows the same number of its first tokens.
    """

    build: BuildOptions = field(default_factory=BuildOptions)
    capacities: tuple[int, ...] = ()
    pack: PackOptions = field(default_factory=lambda: PackOptions(effort="low"))
    model: str = "qwen3-8b"
    trie: AnyPath | None = None
    text: bool = True
    text_limit: int = 8_000_000
