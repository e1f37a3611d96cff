"""`treepack logprobs --carry`: each token of a row in pieces runs once, and has the value of the whole row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.command_line import Run as Command
from support.oracle_model import tiny_config, write_rows
from support.oracle_objectives import own_logprobs
from support.packed_objectives import as_trajectories, packed_model, plain, rollouts
from treepack.errors import TreepackError
from treepack.pack.files import read_rows
from treepack.train.logprobs import term_scores
from treepack.train.scoring_options import AUTO_PIECE, ScoreOptions, piece_size

ONE, TWO = [0] * 10, [i % 2 for i in range(10)]  # the row of each of the ten rollouts


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_joined_rows_have_the_scores_of_each_row_alone(tmp_path: Path, kind: str) -> None:
    rows = list(read_rows(write_rows(tmp_path / "packed", as_trajectories(rollouts(kind)), [i % 4 for i in range(10)])))
    options = ScoreOptions(loss_chunk=3)
    together = term_scores(packed_model(kind), rows, options)
    for row, scores in zip(rows, together, strict=True):
        (alone,) = term_scores(packed_model(kind), [row], options)
        np.testing.assert_allclose(np.stack(scores[:2]), np.stack(alone[:2]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("limit", [1, 3, 7])
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_every_term_in_pieces_has_the_value_of_its_trajectory_alone(tmp_path: Path, kind: str, limit: int) -> None:
    recorded = rollouts(kind)
    (row,) = read_rows(write_rows(tmp_path / "packed", as_trajectories(recorded), ONE))
    assert row.terms is not None
    whole = np.stack(term_scores(packed_model(kind), [row], ScoreOptions(loss_chunk=3))[0][:2])
    pieces = np.stack(term_scores(packed_model(kind), [row], ScoreOptions(loss_chunk=3, carry=limit))[0][:2])
    np.testing.assert_allclose(pieces, whole, rtol=1e-12, atol=1e-12)
    for i, name in enumerate(row.trajectory_ids):
        with torch.no_grad():
            alone = [list(values.values()) for values in own_logprobs(plain(kind), recorded[int(name[1:])])]
        np.testing.assert_allclose(pieces[:, row.terms.trajectory == i], np.array(alone), rtol=1e-9)


@pytest.mark.parametrize("carry", [None, 4])
def test_each_token_of_a_row_runs_once(tmp_path: Path, carry: int | None) -> None:
    (row,) = read_rows(write_rows(tmp_path / "packed", as_trajectories(rollouts()), ONE))
    loaded, seen = packed_model("qwen3"), []
    hook = loaded.model.base_model.register_forward_pre_hook(
        lambda module, args, keywords: seen.append(keywords["input_ids"].numel()), with_kwargs=True
    )
    term_scores(loaded, [row], ScoreOptions(carry=carry))
    hook.remove()
    assert sum(seen) == row.num_tokens
    assert max(seen) <= (carry or row.num_tokens) < row.scale.sum()  # which counts shared prefixes again


def scores_of(packed: Path) -> list[Any]:
    return [[row.terms.old_logprob, row.terms.entropy] for row in read_rows(packed) if row.terms is not None]


def test_the_command_records_pieces_only_if_a_row_was_cut(treepack: Command, tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "tiny.json")
    packed = write_rows(tmp_path / "packed", as_trajectories(rollouts(), without=["old_logprobs"]), TWO)
    lengths = sorted(row.num_tokens for row in read_rows(packed))
    assert lengths[0] < lengths[1]
    common = (
        "logprobs",
        packed,
        "--model",
        config,
        "--device",
        "cpu",
        "--entropies",
        "--quiet",
        "--pass-tokens",
        "1",
        "--out",
    )
    sizes = {"plain": None, "off": "off", "auto": "auto", "longest": lengths[1], "shorter": lengths[0], "small": 3}
    for name, size in sizes.items():
        done = treepack(*common, tmp_path / name, *(() if size is None else ("--carry", size)))
        assert (done.status, done.notes) == (0, "")
    records = {
        name: json.loads((tmp_path / name / "manifest.json").read_text())["logprobs"]["old"].get("carry")
        for name in sizes
    }
    assert records == {"plain": None, "off": None, "auto": None, "longest": None, "shorter": lengths[0], "small": 3}
    whole = [path.read_bytes() for path in sorted((tmp_path / "plain").iterdir())]
    for name in ("off", "auto", "longest"):
        assert [path.read_bytes() for path in sorted((tmp_path / name).iterdir())] == whole
    short = [row.num_tokens for row in read_rows(packed)].index(lengths[0])
    expected = scores_of(tmp_path / "plain")
    for name in ("shorter", "small"):
        values = scores_of(tmp_path / name)
        for columns, own in zip(values, expected, strict=True):
            np.testing.assert_allclose(np.stack(columns), np.stack(own), rtol=1e-5, atol=1e-6)
    # A row that is no longer than a piece keeps every bit.
    assert np.array_equal(scores_of(tmp_path / "shorter")[short], expected[short])


@pytest.mark.parametrize("carry", [0, -1, "on", 2.5])
def test_piece_sizes_without_meaning_are_refused(carry: Any) -> None:
    with pytest.raises(TreepackError, match=r"^carry is .*; expected a number of tokens of at least 1, auto or None"):
        ScoreOptions(carry=carry)
    assert piece_size(ScoreOptions(carry="auto").carry) == AUTO_PIECE
