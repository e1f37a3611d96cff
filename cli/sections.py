"""A command with many options, whose help shows them in sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click


class SectionedCommand(click.Command):
    """A command whose `sections` name its options under headings; options that are in none come last.

    @click.command(cls=SectionedCommand, sections={"Speed": "dtype compile"})
    """

    def __init__(self, *args: Any, sections: Mapping[str, str], **more: Any) -> None:
        """Create the command; `sections` are names of options without their dashes, separated by spaces."""
        super().__init__(*args, **more)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in their sections."""
        # {"loss": ("--loss [sft|...]", "Loss to minimise."), ...}, in the order of the command
        records = {
            parameter.opts[-1].lstrip("-"): record
            for parameter in self.get_params(ctx)
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)) is not None
        }
        for heading, names in self.sections.items():
            with formatter.section(heading):
                formatter.write_dl([records.pop(name) for name in names.split()])
        if records:
            with formatter.section("Other options"):
                formatter.write_dl([*records.values()])
