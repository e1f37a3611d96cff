"""The sections of `--help`."""

from __future__ import annotations

from importlib import import_module

import click
import pytest

from support.command_line import every_command


@pytest.mark.parametrize("command", every_command(), ids=lambda command: command.name)
def test_the_help_of_a_command_with_many_options_has_each_once_in_a_section(command: click.Command) -> None:
    context = click.Context(command)
    names = [each.opts[-1].lstrip("-") for each in command.get_params(context) if isinstance(each, click.Option)]
    sections = import_module("treepack_cli.sections").SECTIONS.get(command.name, {})
    listed = [name for text in sections.values() for name in text.split()]
    assert sorted(listed) == (sorted(names) if len(names) > 11 else [])
    if sections:
        assert [f"\n{heading}:\n" in command.get_help(context) for heading in sections] == [True] * len(sections)
