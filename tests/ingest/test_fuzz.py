"""Damaged files of every format: each is read, or refused with one sentence that names it; nothing else happens.

With `skip_bad`, nothing is refused, and the good record beside the damaged file survives.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.byte_tokenizer import PLAIN, save
from support.damage import damaged, samples, write_samples
from treepack.errors import TreepackError
from treepack.ingest.options import BuildOptions
from treepack.tokenise.tokenization import load_tokenizer
from treepack.trie.directory import read_to_trie

FILES = samples()
NAMES = sorted(FILES)
MAX_ID = 160_000
GOOD = b'{"id": "good", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}\n'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small tokenizer with names for all ids of the samples, so that none of them is refused for its ids."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save(folder, PLAIN)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] |= {f"unused {i}": i for i in range(len(content["model"]["vocab"]), MAX_ID)}
    file.write_text(json.dumps(content))
    return load_tokenizer(str(folder))


def read_damaged(seed: int, folder: Path, tokenizer: Any) -> str:
    """Damage one sample and read it; return "read" or "refused".

    An exception that is not a TreepackError, such as a KeyError of a reader, fails the test with the seed.
    """
    rng = random.Random(seed)
    name = NAMES[seed % len(NAMES)]
    path = write_samples(FILES | {name: damaged(FILES[name], rng)}, name, folder / "damaged")
    if rng.random() < 0.3 and path.suffix != ".yaml":
        path = folder / "damaged"  # the search of a folder skips other files than a caller who names one
    good = folder / "good.jsonl"
    good.write_bytes(GOOD)
    options = BuildOptions(
        skip_bad=rng.random() < 0.5,
        shapes=True,
        expand=rng.choice(["trajectory", "turns"]),
        normalize_ids=rng.random() < 0.2,
        control_tokens=rng.choice(["keep", "text", "skip"]),
    )
    try:
        trie, _ = read_to_trie([path, good] if options.skip_bad else [path], options, tokenizer=tokenizer)
    except TreepackError as error:
        sentence = str(error)
        assert not options.skip_bad, (seed, name, sentence)
        assert "\n" not in sentence, (seed, name, sentence)
        assert str(folder / "damaged") in sentence or "no trajectory with a trained token" in sentence, (
            seed,
            name,
            sentence,
        )
        return "refused"
    except Exception as error:
        raise AssertionError(f"seed {seed}, {name}: {type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(folder / "damaged")
    if options.skip_bad:
        assert "good" in trie.trajectories["trajectory_id"].to_pylist(), (seed, name)
    return "read"


@pytest.mark.parametrize(
    "seeds", [range(150), pytest.param(range(150, 950), marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_a_damaged_file_is_read_or_refused_in_one_sentence(seeds: range, tmp_path: Path, tokenizer: Any) -> None:
    results = [read_damaged(seed, tmp_path, tokenizer) for seed in seeds]
    # Both must be frequent, or the damages are too weak or too strong to find anything.
    assert min(results.count("read"), results.count("refused")) > len(seeds) / 5


def test_every_sample_is_read_before_it_is_damaged(tmp_path: Path, tokenizer: Any) -> None:
    """Only a file that is read with another one, or that no format matches, has no rollout of its own."""
    refused = []
    for name in NAMES:
        path = write_samples(FILES, name, tmp_path / name)
        try:
            read_to_trie([path], BuildOptions(shapes=True), tokenizer=tokenizer)
        except TreepackError:
            refused.append(name)
    assert len(refused) < len(NAMES) / 8, refused
