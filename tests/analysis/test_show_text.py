"""Tokens as text: whole characters at any start of a run, rows that fit, and nothing that could drive a terminal."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from support import byte_tokenizer
from treepack.analysis.show.decoding import TokenDecoder
from treepack.analysis.show.wrapping import ESCAPE, TokenText, escape, escape_text, wrap
from treepack.tokenise.tokenization import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(byte_tokenizer.save(tmp_path_factory.mktemp("tokenizer"), byte_tokenizer.PLAIN))


@pytest.mark.parametrize("text", ["", "plain words", "\u4f60\u597d, \U0001f6b2 e\u0301!", "\u20ac" * 9])
def test_characters_split_over_tokens_are_whole_wherever_a_run_begins(tokenizer: Any, text: str) -> None:
    decoder = TokenDecoder(tokenizer)
    ids = tokenizer.encode(f"<|im_start|>{text}", add_special_tokens=False)
    # A cut inside a character leaves a replacement character before it, and the whole character after it.
    for cut in range(1, len(ids) + 1):
        first = "".join(token.text for token in decoder.decode(ids[:cut], []))
        second = "".join(token.text for token in decoder.decode(ids[cut:], ids[:cut]))
        assert first.rstrip("\ufffd") + second == f"<|im_start|>{text}"


def test_blanks_that_belong_to_words_are_kept_after_special_tokens() -> None:
    """Such tokenizers write the blank into the word, and their decoder strips the first blank of a text."""
    words = ["<s>", "<unk>", "\u2581Hi", "\u2581you", *(f"<0x{byte:02X}>" for byte in range(256))]
    bpe = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    bpe.decoder = decoders.Sequence(steps)
    decoder = TokenDecoder(PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>"))
    euro = [4 + byte for byte in "\u20ac".encode()]
    assert [(token.index, token.text) for token in decoder.decode([0, 2, *euro, 3], [])] == [
        (0, "<s>"),
        (1, " Hi"),
        (4, "\u20ac"),
        (5, " you"),
    ]
    assert [token.text for token in decoder.decode([2, 3], [])] == ["Hi", " you"]
    assert [token.text for token in decoder.decode([3], [0, 2])] == [" you"]


def test_ids_without_text_are_named(tokenizer: Any) -> None:
    texts = list(TokenDecoder(tokenizer).decode([70, 99_999, 71], []))
    assert [token.unknown for token in texts] == [False, True, False]
    assert "99999" in texts[1].text


def test_bytes_that_are_no_character_do_not_delay_the_rest(tokenizer: Any) -> None:
    # The first of three bytes of a character, a thousand times: no text is ever complete.
    lone = tokenizer.encode("\u4f60", add_special_tokens=False)[0]
    texts = list(TokenDecoder(tokenizer).decode([lone] * 1000, []))
    assert len(texts) > 50  # at most 8 tokens wait, so at least 1000 / 9 texts come
    assert set("".join(token.text for token in texts)) == {"\ufffd"}


@given(st.lists(st.text(max_size=12), max_size=8), st.integers(24, 60))
def test_wrapped_text_is_printable_and_complete_and_fits_the_width(parts: list[str], width: int) -> None:
    rows = list(wrap([TokenText(i, part) for i, part in enumerate(parts)], width=width, trained=True))
    joined = "".join(row.text.plain for row in rows)
    expected = escape_text("".join(parts))
    assert joined.isprintable()
    assert joined == (expected[:-1] + "\\x20" if expected.endswith(" ") else expected)
    # An escape is never split. The longest, "\\U000e0001", has ten columns and fits the narrowest row of 24.
    assert all(row.text.cell_len <= width for row in rows)
    assert sum(row.place is not None for row in rows) == len("".join(parts).removesuffix("\n").split("\n")) * (
        "".join(parts) != ""
    )


def test_wide_characters_take_two_columns_and_combining_ones_none() -> None:
    wide = wrap([TokenText(0, "\u4f60" * 40)], width=20, trained=False)
    assert [len(row.text) for row in wide] == [10, 10, 10, 10]
    combined = list(wrap([TokenText(0, "e\u0301" * 40)], width=20, trained=False))
    assert [row.text.plain for row in combined] == ["e\u0301" * 20] * 2


@pytest.mark.parametrize("character", ["\x1b", "\x07", "\x9b", "\u202e", "\u200d", "\r", "\x7f", "\u2028", "\ud800"])
def test_characters_that_could_drive_a_terminal_are_escaped(character: str) -> None:
    assert re.fullmatch(r"\\(r|x[0-9a-f]{2}|u[0-9a-f]{4})", escape(character))


def test_blanks_at_a_break_and_markup_stay_text() -> None:
    text = "[bold]a[/bold]" + " " * 300 + ":smile: \\x1b"
    rows = list(wrap([TokenText(0, text)], width=30, trained=False))
    assert "".join(row.text.plain for row in rows) == text
    assert max(row.text.cell_len for row in rows) == 30
    assert {span.style for row in rows for span in row.text.spans} <= {""}


@given(st.text(alphabet="ab \n\x1b", max_size=200), st.integers(24, 40), st.booleans())
def test_escapes_have_a_style_of_their_own_unless_the_text_is_trained(text: str, width: int, trained: bool) -> None:
    for row in wrap([TokenText(0, text)], width=width, trained=trained):
        styled = "".join(row.text.plain[span.start : span.end] for span in row.text.spans if span.style == ESCAPE)
        assert styled == ("" if trained else "".join(re.findall(r"\\(?:n|x[0-9a-f]{2})", row.text.plain)))
