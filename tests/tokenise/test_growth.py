"""Rules of a tokenizer that multiply a text are refused before the first text, and rules in use are not."""

from __future__ import annotations

import base64
import struct
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from support.byte_tokenizer import PLAIN, save
from treepack.errors import TreepackError
from treepack.tokenise.encoder import Encoder
from treepack.tokenise.tokenization import load_tokenizer, read_tokenizer

TEN = normalizers.Replace(".", "x" * 10)


def table(*texts: bytes) -> Any:
    """A table of SentencePiece: the size of a trie, a trie of one unit, and the texts that it leads to."""
    content = struct.pack("<II", 4, 0) + b"".join(text + b"\0" for text in texts)
    return normalizers.Precompiled(base64.b64decode(base64.b64encode(content)))


HOSTILE = {
    "a chain": normalizers.Sequence([TEN] * 9),
    "a chain in chains": normalizers.Sequence([normalizers.Sequence([TEN, TEN]), normalizers.Sequence([TEN, TEN])]),
    "one rule": normalizers.Replace(".", "x" * 1001),
    "the empty text": normalizers.Replace("", "x" * 1_000_000),
    "an expression that matches nothing": normalizers.Replace(Regex("a*"), "x" * 1000),
    "two characters": normalizers.Replace("..", "x" * 2002),
    "prefixes": normalizers.Sequence([normalizers.Prepend("xxxx")] * 5),
    "compatibility forms": normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("x", "\ufdfa")] * 3),
    "tables": normalizers.Sequence([table(b"x" * 40)] * 2),
}
USED = {
    "Llama": normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
    "XLNet": normalizers.Sequence(
        [
            normalizers.Replace("``", '"'),
            normalizers.NFKD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            table("\u0627".encode() * 18),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    ),
    "BERT": normalizers.BertNormalizer(),
}


def folder_with(folder: Path, **parts: Any) -> str:
    save(folder, PLAIN)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for name, part in parts.items():
        setattr(backend, name, part)
    backend.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.mark.parametrize("read", [load_tokenizer, read_tokenizer])
@pytest.mark.parametrize("rules", HOSTILE)
def test_rules_that_multiply_a_text_are_refused(tmp_path: Path, rules: str, read: Any) -> None:
    name = folder_with(tmp_path, normalizer=HOSTILE[rules])
    with pytest.raises(TreepackError, match=r"tokenizer.json can make a text more than 1000 times longer") as caught:
        read(name)
    assert str(caught.value).startswith(f"{name}: ")


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 30)},
        {"decoder": decoders.Sequence([decoders.Replace(".", "x" * 10), decoders.Replace("x", ".")] * 5)},
    ],
)
def test_rules_on_words_and_of_decoding_are_measured_too(tmp_path: Path, parts: dict[str, Any]) -> None:
    with pytest.raises(TreepackError, match="1000 times longer"):
        read_tokenizer(folder_with(tmp_path, **parts))


@pytest.mark.parametrize("rules", USED)
def test_rules_in_use_are_not_refused(tmp_path: Path, rules: str) -> None:
    assert (
        len(load_tokenizer(folder_with(tmp_path, normalizer=USED[rules], pre_tokenizer=pre_tokenizers.Metaspace()))) > 0
    )


def test_a_padding_of_the_file_fills_nothing(tmp_path: Path) -> None:
    name = save(tmp_path, PLAIN)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_padding(length=1 << 40)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Encoder(read_tokenizer(name)).encode("abc")) == 3


def test_a_panic_of_the_tokenizer_names_it(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(save(tmp_path, PLAIN))
    encoder = Encoder(tokenizer)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("", "xy")
    with pytest.raises(TreepackError, match="its tokenizer failed") as caught:
        encoder.encode("new text")
    assert str(caught.value).startswith(f"{tmp_path}: its tokenizer failed (PanicException: ")
