"""Words and numbers of the command line: guesses for wrong ones, two spellings, common options, sizes."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version

import click
import pytest

from support.command_line import Run


def leaves(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yield the commands that have no subcommands."""
    if not isinstance(command, click.Group):
        yield name, command
        return
    context = click.Context(command)
    for each in command.list_commands(context):
        inner = command.get_command(context, each)
        assert inner is not None
        yield from leaves(inner, f"{name} {each}")


COMMANDS = dict(leaves(import_module("treepack_cli").commands, "treepack"))


def test_every_command_has_quiet() -> None:
    assert len(COMMANDS) >= 20
    without = [name for name, each in COMMANDS.items() if "--quiet" not in [o for p in each.params for o in p.opts]]
    assert without == []


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("stat x", "No such command 'stat'. Did you mean 'stats'?"),
        ("build_trie x", "No such command 'build_trie'. Did you mean 'build-trie'?"),
        ("zzzz x", "No such command 'zzzz'."),
        ("train x --model y --loss grop", "'sft', 'cispo', 'dppo_kl', "),
        ("train x --model y --loss grop", "Did you mean 'grpo'?"),
    ],
)
def test_a_wrong_word_is_answered_by_the_nearest_one(treepack: Run, command: str, sentence: str) -> None:
    result = treepack(*command.split())
    assert result.status == 2
    assert sentence in result.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("command", "option"), [("train", "loss"), ("advantages", "estimator"), ("prepare", "advantages")]
)
def test_a_hyphen_and_an_underscore_are_the_same_in_a_value(command: str, option: str) -> None:
    (parameter,) = (each for each in COMMANDS[f"treepack {command}"].params if f"--{option}" in each.opts)
    one, other = (parameter.type.convert(word, parameter, None) for word in ("dr_grpo", "dr-grpo"))
    assert one == other


def test_the_version_names_the_packages_of_a_report(treepack: Run) -> None:
    lines = treepack("--version").out.splitlines()
    assert lines[1:2] == [f"torch {version('torch')}"]
    assert [line.split()[0] for line in lines] == ["treepack", "torch", "triton", "transformers", "loops"]


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "treepack", "stat"], capture_output=True, text=True, check=False)
    assert (done.returncode, "Did you mean 'stats'?" in done.stderr) == (2, True)


sizes = importlib.import_module("treepack_cli.sizes")


@pytest.mark.parametrize(
    ("text", "tokens"), [("8192", 8192), ("8k", 8192), ("16K", 16_384), ("4_096", 4096), ("1m", 1 << 20), (" 5 ", 5)]
)
def test_a_number_of_tokens_may_have_a_suffix_or_underscores(text: str, tokens: int) -> None:
    assert sizes.TokenCount().convert(text, None, None) == tokens


@pytest.mark.parametrize("text", ["", "k", "4x", "-1", "1.5k", "8 k k", "_4", "0", "3000m", "\u0663"])
def test_other_texts_are_wrong_usage_that_shows_an_example_or_the_limit(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"such as 8192 or 8k|between 1 and 2,147,483,647 tokens"):
        sizes.TokenCount().convert(text, None, None)


def test_a_list_of_numbers_is_split_at_commas() -> None:
    assert sizes.TokenCounts().convert("8k,32k", None, None) == (8192, 32_768)


def test_sizes_of_pieces_and_numbers_of_layers_have_words() -> None:
    pieces, layers = sizes.KINDS["carry"], sizes.KINDS["checkpoint_layers"]
    assert [pieces.convert(text, None, None) for text in ("8k", "auto", "off")] == [8192, "auto", None]
    assert [layers.convert(text, None, None) for text in ("0", "28", "auto")] == [0, 28, "auto"]


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "Auto", "\u0663"])
def test_other_words_are_wrong_usage_that_names_the_known_ones(text: str) -> None:
    with pytest.raises(click.BadParameter, match="a number of tokens such as 8192 or 8k, nor auto or off"):
        sizes.KINDS["carry"].convert(text, None, None)
    with pytest.raises(click.BadParameter, match="is not a number of layers, all or auto"):
        sizes.KINDS["checkpoint_layers"].convert(text, None, None)


def test_letters_in_a_wrong_order_are_guessed_before_a_nearer_word(treepack: Run) -> None:
    assert treepack("train", "x", "--loss", "gpro").err.endswith("Did you mean 'grpo'?\n")
