"""The rows of each step without torch are those of the trainer, and their rollouts are what the explorer gets."""

from __future__ import annotations

import base64
import gzip
import json
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.oracle_model import packed_directory
from support.refusal import refusal
from support.run_folder import TOKENIZER, packed_text, run_folder
from support.strategies import make
from treepack.data.mixture import open_packed
from treepack.errors import TreepackError
from treepack.report.live import step_rollouts
from treepack.report.live.run_state import RunFolder
from treepack.report.live.step_rollouts import read_steps, rollout_texts
from treepack.report.live.step_rows import ScheduledRows, open_run_rows
from treepack.tokenise.tokenization import load_tokenizer
from treepack.train.options import TrainOptions
from treepack.train.schedule import plan_steps


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of two training steps, some without a trained token."""
    made = [
        make(
            f"r{i}",
            [1, 2 + i, 3, 4, 5 + i % 3],
            group=f"g{i // 2}",
            step=i // 6,
            spans=[] if i == 4 else None,
            reward=i / 12,
        )
        for i in range(12)
    ]
    return packed_directory(tmp_path_factory.mktemp("packed") / "packed", made, capacity=9)


def rows_of(packed: Path, folder: Path, **options: Any) -> ScheduledRows:
    return open_run_rows(RunFolder(run_folder(folder, packed=packed, options=options)).record or {}, folder)


@given(
    size=st.integers(1, 4),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 5),
    blocks=st.sampled_from([None, 1, 2]),
    steps=st.none() | st.integers(1, 30),
)
def test_the_rows_of_each_step_are_those_of_the_trainer(
    packed: Path, size: int, epochs: int, seed: int, blocks: int | None, steps: int | None
) -> None:
    options = {"rows_per_step": size, "epochs": epochs, "seed": seed, "blocks": blocks, "steps": steps}
    schedule = plan_steps(open_packed(packed), TrainOptions(**options))  # type: ignore[arg-type]
    record = json.loads((run_record(packed)).read_text())
    rows = open_run_rows({**record, "options": options}, packed)
    assert rows.num_steps == len(schedule)
    assert [rows.of_step(step) for step in range(1, len(schedule) + 1)] == [step.rows for step in schedule]
    assert rows.num_tokens.tolist() == open_packed(packed).num_tokens.tolist()


def run_record(packed: Path) -> Path:
    folder = packed.parent / "run"
    return (folder if folder.exists() else run_folder(folder, packed=packed)) / "run.json"


def test_threads_that_ask_for_different_epochs_get_their_own_rows(packed: Path, tmp_path: Path) -> None:
    rows = rows_of(packed, tmp_path / "run", rows_per_step=1, epochs=2)
    first, second = (
        [rows.of_step(epoch * rows.steps_per_epoch + i + 1) for i in range(rows.steps_per_epoch)] for epoch in (0, 1)
    )
    place = next(i for i in range(rows.steps_per_epoch) if first[i] != second[i])
    asks = False

    def ask_between_lines(frame: FrameType, event: str, _: object) -> Any:
        # What another thread does at the worst moment: between two lines of `of_step` it asks for another epoch.
        nonlocal asks
        if frame.f_code is ScheduledRows.of_step.__code__ and event == "line" and not asks:
            asks = True
            rows.of_step(rows.steps_per_epoch + place + 1)
            asks = False
        return ask_between_lines

    before = sys.gettrace()
    sys.settrace(ask_between_lines)
    try:
        found = rows.of_step(place + 1)
    finally:
        sys.settrace(before)
    assert found == first[place]


def test_no_step_needs_torch(packed: Path, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", packed=packed)
    code = (
        "import sys, json, pathlib\nfrom treepack.report.live.step_rows import open_run_rows\n"
        f"folder = pathlib.Path({str(folder)!r})\n"
        "rows = open_run_rows(json.loads((folder / 'run.json').read_text()), folder)\n"
        "rows.read(rows.of_step(1)[0])\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_rows_are_found_beside_the_run_and_must_be_those_of_the_run(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = json.loads(run_record(packed).read_text()) | {"packed": packed.name}
    monkeypatch.chdir(tmp_path)
    assert open_run_rows(record, packed.parent / "run").num_steps > 1
    assert "no such packed directory; run the command in the folder where" in refusal(
        open_run_rows, record, tmp_path / "run"
    )
    assert open_run_rows(record | {"folder": str(packed.parent)}, tmp_path / "run").num_steps > 1
    assert "has other rows than the run was trained on" in refusal(
        open_run_rows, record | {"packed_sha256": "0"}, packed.parent / "run"
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"options": 5}, "no options"),
        ({"options": {"rows_per_step": 0, "epochs": 1, "seed": 0}}, "rows_per_step; expected an integer of at least 1"),
        ({"options": {"rows_per_step": 1, "epochs": 1, "seed": -1}}, "seed; expected"),
        ({"options": {"rows_per_step": 1, "epochs": 1, "seed": 0, "mix": [1, 2]}}, "--mix"),
        ({"packed": "s3://bucket/packed"}, "object store"),
    ],
)
def test_rows_that_cannot_be_known_are_refused_in_one_sentence(
    packed: Path, tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    record = json.loads(run_record(packed).read_text()) | change
    with pytest.raises(TreepackError, match=sentence):
        open_run_rows(record, tmp_path)


def block(blocks: dict[str, str], name: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(blocks[name])))


def test_the_explorer_has_the_rollouts_of_the_newest_steps_with_their_steps(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(packed, tmp_path / "run", rows_per_step=2)
    texts = rollout_texts(rows, name=None, limit=100)
    whole = read_steps(rows, rows.num_steps, texts)
    assert (whole.first, whole.last) == (1, rows.num_steps)
    ids = {
        name
        for step in range(1, rows.num_steps + 1)
        for row in rows.of_step(step)
        for name in rows.read(row).trajectory_ids
    }
    assert set(block(whole.blocks, "sample-ids")) == ids
    names = block(whole.blocks, "groups-names")
    assert {name.split(" ", 1)[1] for name in names} == {f"(step {step})" for step in range(1, rows.num_steps + 1)}
    monkeypatch.setattr(step_rollouts, "MAX_TOKENS", 1)
    assert read_steps(rows, 2, texts).first == 2
    monkeypatch.setattr(step_rollouts, "MAX_STEP_TOKENS", 1)
    assert "1 more rows of the step are left out" in read_steps(rows, 1, texts).about
    with pytest.raises(TreepackError, match=r"step 99 is not one of the \d+ steps of the run"):
        read_steps(rows, 99, texts)


def test_texts_are_decoded_by_the_tokenizer_of_the_rows(tmp_path: Path) -> None:
    ids = load_tokenizer(str(TOKENIZER)).encode("Ride slower.", add_special_tokens=False)
    path = packed_text(tmp_path / "packed", [make("a", ids)], capacity=64)
    rows = rows_of(path, tmp_path / "run")
    shown = read_steps(rows, 1, rollout_texts(rows, name=None, limit=1000))
    assert "Ride slower." in "".join("".join(node) for node in block(shown.blocks, "text-0"))
    hidden = read_steps(rows, 1, rollout_texts(rows, name=None, limit=None))
    assert not any(name.startswith("text-") for name in hidden.blocks)
    assert "contains no text" in hidden.about
