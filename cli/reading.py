"""The options by which raw rollouts are read, for `build-trie`, `stats`, `show` and `report`."""

from __future__ import annotations

import click

from treepack.ingest.options import SHARES, BuildOptions

from .choices import WordChoice
from .option_groups import as_usage, field_options, option_group

_FILE = {"type": click.Path(exists=True, dir_okay=False)}
TEMPLATE_OPTIONS = field_options(BuildOptions, "chat_template tools", chat_template=_FILE, tools=_FILE)
"""The options of every command that renders conversations."""

reading_options = option_group(
    "build",
    [
        *field_options(
            BuildOptions,
            "format columns tokenizer",
            format={"metavar": "NAME", "show_default": False},
            columns={"type": str, "metavar": "FILE|KEY=PATH,..."},
            tokenizer={"metavar": "NAME_OR_DIR"},
        ),
        *TEMPLATE_OPTIONS,
        *field_options(
            BuildOptions,
            "expand per_path share reward_key normalize_ids train_all control_tokens truncated failed strict skip_bad "
            "max_record_size workers",
            share={"type": WordChoice([name for name in SHARES if name != "none"])},
            reward_key={"metavar": "KEY"},
            max_record_size={"default": "1G"},
        ),
    ],
    as_usage(BuildOptions),
)
"""Adds the reading options to a command, which receives them as `build: BuildOptions`."""
