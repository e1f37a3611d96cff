"""Options of statistics and of the report.

This file imports no numerical library, so that the command line can take its defaults from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from treepack.files.remote.address import AnyPath
from treepack.ingest.options import BuildOptions
from treepack.option_fields import check_options, option, read_counts
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
    device: str = option(
        "h200",
        "GPU that trains it: a100, h100, h200, b200, l40s, rtx4090, rtx5090, or its rate in TFLOP/s in bfloat16.",
    )

    def __post_init__(self) -> None:
        """Read texts such as "4k", and refuse values that are not numbers of tokens."""
        read_counts(self, "capacities")
        check_options(self)


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Options of `treepack report`; for a training run, of which only the tokenizer and the text are used."""

    # How raw rollouts are read; its tokenizer also decodes token ids.
    build: BuildOptions = field(default_factory=BuildOptions)
    trie: AnyPath | None = option(
        None, "Trie of a packed directory; default: the one it was packed from, or else one built from its rows."
    )
    capacities: tuple[int, ...] = option(
        (), "Capacities at which ERR is compared with POR; default: powers of two that every rollout fits."
    )
    # Method, effort and time limit of the plans; its other fields are not used.
    pack: PackOptions = field(default_factory=lambda: PackOptions(effort="low"))
    model: str | None = option(
        None,
        "Forecast of compute and memory for this model: a preset or a config.json; see docs/forecast.md. Without one, "
        "compute is that of qwen3-8b.",
    )
    no_text: bool = option(False, "Leave the text of the rollouts out of the page.")
    text_limit: int = option(
        8_000_000,
        "Maximum number of tokens shown as text; every node shows the same number of its first tokens.",
        minimum=0,
    )

    def __post_init__(self) -> None:
        """Read texts such as "4k", and refuse values that are not numbers of tokens."""
        read_counts(self, "capacities")
        check_options(self)
