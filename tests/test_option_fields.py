"""Options as fields: bad values are refused, and a command has the help, bounds and defaults of the fields."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import click
import pytest
from click.testing import CliRunner

from support.refusal import refusal
from treepack.attention import IMPLEMENTATIONS
from treepack.model.head.token_loss import CHUNK
from treepack.option_fields import check_options, option, option_texts
from treepack.train import options as train_options
from treepack.train.options import ATTENTION, TrainOptions
from treepack.train.scoring_options import ScoreOptions

groups = import_module("treepack_cli.option_groups")


@dataclass(frozen=True)
class BakeOptions:
    minutes: int = option(10, "Minutes in the oven.", minimum=1, maximum=90)
    share: float = option(0.5, "Share of rye.", minimum=0)
    grain: str | None = option("rye", "Kind of grain.", choices=("rye", "oat"))
    rest: int | None = option(2, "Hours of rest.", minimum=1)
    salt: bool = option(False, "Add salt.")
    oven: str = "left"

    def __post_init__(self) -> None:
        check_options(self)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"minutes": 0}, "minutes is 0; expected 1 to 90"),
        ({"minutes": 91}, "minutes is 91; expected 1 to 90"),
        ({"minutes": None}, "minutes is None; expected a number"),
        ({"share": -0.5}, "share is -0.5; expected a finite number of at least 0"),
        ({"share": math.nan}, "share is nan; expected a finite number of at least 0"),
        ({"share": math.inf}, "share is inf; expected a finite number of at least 0"),
        ({"grain": "corn"}, "grain is 'corn'; expected one of rye, oat"),
    ],
)
def test_a_value_that_an_option_does_not_take_is_refused(changes: dict[str, Any], message: str) -> None:
    assert refusal(BakeOptions, **changes) == message


def test_none_is_a_value_of_an_option_that_may_be_none() -> None:
    options = BakeOptions(grain=None, rest=None)
    assert (options.grain, options.rest) == (None, None)


def test_a_command_gets_the_value_that_its_options_make() -> None:
    options = groups.field_options(BakeOptions, "grain salt minutes", minutes={"name": "time"})

    def show(bake: BakeOptions) -> None:
        click.echo(repr(bake))

    bread = click.command()(groups.option_group("bake", options, BakeOptions)(show))
    run = CliRunner().invoke
    assert (
        run(bread, ["--grain", "oat", "--salt", "--time", "90"]).output == f"{BakeOptions(90, 0.5, 'oat', salt=True)}\n"
    )
    assert run(bread, []).output == f"{BakeOptions()}\n"
    assert "91 is not in the range 1<=x<=90" in run(bread, ["--time", "91"]).output
    page = " ".join(run(bread, ["--help"]).output.split())
    assert (
        "--grain [rye|oat] Kind of grain. [default: rye] --salt Add salt. --time INTEGER RANGE Minutes in the oven."
        in page
    )
    assert "[default: 10; 1<=x<=90]" in page


def test_names_and_numbers_that_options_repeat_are_those_of_the_library() -> None:
    assert tuple(IMPLEMENTATIONS) == ATTENTION
    assert train_options.CHUNK == CHUNK
    assert ScoreOptions().loss_chunk == CHUNK


def test_the_command_train_has_every_option_of_a_run() -> None:
    command = import_module("treepack_cli.train").train
    names = {each.name for each, _ in option_texts(TrainOptions)}
    assert len(names) > 20
    assert names <= {parameter.name for parameter in command.params}
