"""The encoder and its tokenizer: splitting text and caching ids never change an id."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from support.byte_tokenizer import PLAIN, SPECIAL, save
from support.paths import SAMPLE_DATA
from support.read_rollouts import tokenize
from treepack.errors import TreepackError
from treepack.tokenise import encoder as encoder_module
from treepack.tokenise.encoder import Encoder
from treepack.tokenise.tokenization import fingerprint, load_tokenizer
from treepack.trajectory import PromptCompletion, Trajectory


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(save(tmp_path_factory.mktemp("plain"), PLAIN))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TreepackError, match=f"{tmp_path}: contains no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_model_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    # transformers makes one of the type of the model, which has special tokens only.
    (tmp_path / "config.json").write_text((SAMPLE_DATA / "tiny-qwen3.json").read_text())
    with pytest.raises(TreepackError, match=f"{tmp_path}: contains no tokenizer"):
        load_tokenizer(str(tmp_path))


sections = st.lists(st.sampled_from([*SPECIAL, "The quick ", "\n", " ", "é日", "<|im", "|>", "dog."]), max_size=8)


@given(sections)
def test_the_encoder_gives_the_ids_of_the_tokenizer(tokenizer: Any, parts: list[str]) -> None:
    encoder = Encoder(tokenizer)
    joined = "".join(parts)
    # The second time, the ids come from the cache.
    for _ in range(2):
        expected = tokenizer(joined, add_special_tokens=False)["input_ids"]
        assert encoder.encode(joined).tolist() == expected


@pytest.mark.parametrize("quirk", ["lstrip", "normalized", "prefix"])
def test_text_is_not_split_where_splitting_would_change_the_ids(tmp_path: Path, quirk: str) -> None:
    # lstrip: the token takes the whitespace before it. normalized: it is found after normalisation only. prefix: each
    # text that is tokenised alone gets a "_".
    flags = {} if quirk == "prefix" else {quirk: True}
    special: list[Any] = [AddedToken(token, special=True, **({"normalized": False} | flags)) for token in SPECIAL]
    prefix = normalizers.Prepend("_") if quirk == "prefix" else None
    tokenizer = load_tokenizer(save(tmp_path, None, special, prefix))
    encoder = Encoder(tokenizer)
    for joined in ("dog \n<|im_end|>\n fox", "<|im_start|> a", "a<|im_end|>b"):
        assert encoder.encode(joined).tolist() == tokenizer(joined, add_special_tokens=False)["input_ids"]


def test_the_cache_of_the_encoder_is_bounded(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_module, "CACHED_CHARACTERS", 20)
    encoder = Encoder(tokenizer)
    # Five texts of 8 characters; two of them fit 20 characters.
    first = [encoder.encode(str(i) * 8).tolist() for i in range(5)]
    assert [encoder.encode(str(i) * 8).tolist() for i in range(5)] == first
    assert encoder._cached == sum(map(len, encoder._cache)) <= 20


def test_different_vocabularies_have_different_fingerprints(tokenizer: Any, tmp_path: Path) -> None:
    identity = fingerprint(tokenizer)
    assert (identity["name"], identity["vocab_size"]) == (tokenizer.name_or_path, len(tokenizer))
    assert identity["sha256"] == fingerprint(load_tokenizer(identity["name"]))["sha256"]
    other = load_tokenizer(save(tmp_path, None, [*SPECIAL, "<more>"]))
    assert fingerprint(other)["sha256"] != identity["sha256"]


class Vocabulary:
    """The part of a tokenizer that has a fingerprint."""

    name_or_path = "t"

    def __init__(self, ids: dict[str, int]) -> None:
        self._ids = ids

    def get_vocab(self) -> dict[str, int]:
        return self._ids

    def __len__(self) -> int:
        return len(self._ids)


@given(st.dictionaries(st.text(max_size=4), st.integers(0, 9) | st.integers(0, 1 << 20), max_size=12))
def test_a_fingerprint_is_the_sha256_of_the_vocabulary_in_json_by_id(vocabulary: dict[str, int]) -> None:
    by_id = sorted(vocabulary.items(), key=lambda item: (item[1], item[0]))
    expected = hashlib.sha256(json.dumps(by_id).encode()).hexdigest()
    assert fingerprint(Vocabulary(vocabulary))["sha256"] == expected


def test_importing_costs_no_transformers_and_long_text_gives_no_warning(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    code = "import sys, treepack.tokenise.tokenization; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    # transformers warns when a text is longer than the model takes, which means nothing here.
    short = copy.deepcopy(tokenizer)
    short.model_max_length = 4
    with caplog.at_level(logging.WARNING):
        list(tokenize([Trajectory("t", "s", PromptCompletion("The quick brown fox", "jumps over"))], tokenizer=short))
    assert caplog.records == []
