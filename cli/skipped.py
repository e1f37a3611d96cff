"""Print the names of skipped rollouts, after a first line if they are many, and of rollouts with control tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from .streams import printable

SHOWN = 5  # rollouts that a summary names


def print_many_skipped(skipped: Mapping[str, Any] | None) -> None:
    """Print one line if so many rollouts were skipped that this matters more than any figure."""
    from treepack.analysis.summary import skipped_sentence

    if sentence := skipped_sentence(skipped):
        click.echo(printable(sentence))


def print_skipped(skipped: Mapping[str, Any] | None) -> None:
    """Print the first skipped rollouts with their reasons, and how many groups lost a rollout."""
    if not skipped:
        return
    click.echo(f"skipped rollouts: {skipped['num_skipped']:,}")
    names = skipped["rollouts"][:SHOWN]
    for each in names:
        click.echo(f"  {printable(each['reason'])}")
    if more := skipped["num_skipped"] - len(names):
        click.echo(f"  and {more:,} more")
    lost = f" (all of their rollouts: {skipped['num_groups_lost']:,})" if skipped["num_groups_lost"] else ""
    click.echo(f"groups that lost a rollout: {skipped['num_groups']:,}{lost}")
    if skipped["num_without_group"]:
        click.echo(f"skipped rollouts that name no group: {skipped['num_without_group']:,}")


def print_control_tokens(record: Mapping[str, Any] | None) -> None:
    """Print the first rollouts whose messages spell out a control token in text that is trained."""
    if not record:
        return
    click.echo("control tokens in text that is trained; --control-tokens text makes them ordinary text:")
    names = record["rollouts"][:SHOWN]
    for each in names:
        click.echo(f"  {printable(each['source'])}: {printable(each['note'])}")
    if more := record["num_rollouts"] - len(names):
        click.echo(f"  and {more:,} more")
