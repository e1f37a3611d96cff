"""Texts that share their beginning, and ids of prompts that begin alike, against plain strings and whole encodings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treepack.tokenise.encoder import Encoder
from treepack.tokenise.samples import PromptIds, sections_of
from treepack.tokenise.template.texts import ROOT, ChainedText, TextChunks, common
from treepack.tokenise.tokenization import read_tokenizer

SAMPLE = Path(__file__).parents[2] / "sample_data" / "tokenizer"
# Sections of special tokens too, so that a cut depends on the text after it.
PIECES = ["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<|im_end|", ">", "a", " b", "\n", "word", "<", "  "]
texts = st.lists(st.lists(st.sampled_from(PIECES), max_size=4).map("".join), max_size=4)


def text_of(chunks: TextChunks, parts: list[str], tail: str) -> ChainedText:
    chunk = ROOT
    for part in parts:
        chunk = chunks.after(chunk, part)
    return ChainedText(tail, chunk)


@given(texts, texts, st.sampled_from(PIECES), st.sampled_from(PIECES), st.integers(0, 40), st.integers(0, 40))
def test_a_text_is_its_string(a: list[str], b: list[str], tail: str, other: str, start: int, end: int) -> None:
    chunks = TextChunks()
    x, y = text_of(chunks, a, tail), text_of(chunks, b, other)
    p, q = "".join(a) + tail, "".join(b) + other
    assert (str(x), len(x), str(x.plus(other))) == (p, len(p), p + other)
    assert x.slice(start) == p[start:]
    assert x.slice(start, end) == p[start:end]
    assert str(x.prefix(min(end, len(p)))) == p[:end]
    assert x.startswith(y) == p.startswith(q)
    assert x.startswith(x.prefix(min(end, len(p))))
    assert p[: common(x, y)] == q[: common(x, y)]
    assert p.endswith(x.ending(start))
    assert len("".join(x.ending(start).split())) >= min(start, len("".join(p.split())))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return read_tokenizer(str(SAMPLE))


@settings(max_examples=60)
@given(st.lists(st.tuples(texts, st.sampled_from(PIECES), st.sampled_from(PIECES)), min_size=1, max_size=5))
def test_ids_of_prompts_are_those_of_whole_texts(tokenizer: Any, prompts: list[tuple[list[str], str, str]]) -> None:
    encoder, chunks = Encoder(tokenizer), TextChunks()
    shared = PromptIds(encoder)
    for parts, tail, answer in prompts:
        text = text_of(chunks, parts, tail + answer)
        spans = [(len(text) - len(answer), len(text), 1.0)]
        ids = [ids.copy() for ids, _ in shared.sections(text, spans)]
        whole = [ids for ids, _ in sections_of(encoder, str(text), spans)]
        assert np.concatenate(ids).tolist() == np.concatenate(whole).tolist()
        assert ids[0].tolist() == whole[0].tolist()
