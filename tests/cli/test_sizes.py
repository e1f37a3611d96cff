"""Numbers of tokens on the command line."""

from __future__ import annotations

import importlib

import click
import pytest

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
