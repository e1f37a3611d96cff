"""The directory of a training run, from its first step to the finished model.

out/run.json         written first: what the run computes, so that only the same run is resumed
out/metrics.jsonl    a line per optimiser step
out/checkpoints/     see `checkpoint`
out/...              weights, config and tokenizer, once training is complete
out/train.json       written last: options, inputs, notes; a directory without it is unfinished
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from treepack import __version__
from treepack.directory import RUN, finished_file, refuse_existing
from treepack.errors import TreepackError
from treepack.run import Run

FORMAT = "treepack-train"
VERSION = 2
FINISHED = "train.json"
METRICS = "metrics.jsonl"


def begin(run: Run, out: Path, *, overwrite: bool, resume: bool) -> None:
    """Make `out` the directory of `run`: new, or with `resume` the one that an equal run has left.

    Raises:
        TreepackError: `out` is in the way, or was left by a run that computes something else.
    """
    if resume and (out / RUN).exists():
        _check_same(run, out)
        return
    if not overwrite and (out / RUN).exists() and not (out / FINISHED).exists():
        raise TreepackError(f"{out} holds a run that is not complete; go on with --resume or replace it by --overwrite")
    refuse_existing(out, overwrite=overwrite, inputs=[run.dataset.path, run.loaded.source])
    try:
        if out.exists():
            shutil.rmtree(out)
        out.mkdir(parents=True)
        _write(out / RUN, {**_identity(run), "treepack": __version__})
    except OSError as error:
        raise TreepackError(f"{out}: cannot be written ({error.strerror or error}); choose another --out") from error


def is_finished(out: Path) -> bool:
    """Whether the model in `out` is complete."""
    return (out / FINISHED).exists()


def finish(run: Run, out: Path, weights: dict[str, Any] | None) -> None:
    """Write the model in its own format, and last `train.json`; an earlier attempt that was cut off is replaced.

    Args:
        run: the trained run.
        out: its directory.
        weights: the model's tensors where they are not in the model itself.

    Raises:
        TreepackError: the disk fails.
    """
    from treepack.model import without_bars

    model = run.loaded.model
    temporary = out / ".weights.partial"
    record = {
        **_identity(run),
        "treepack": __version__,
        "attention": run.loaded.attention,
        "num_steps": len(run.schedule),
        "num_ranks": run.ranks.size,
        "options": run.options.as_record(),
        "notes": list(run.notes),
    }
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        model.eval()
        with without_bars():
            model.save_pretrained(temporary, **({} if weights is None else {"state_dict": weights}))
        if run.tokenizer is not None:
            run.tokenizer.save_pretrained(temporary)
        for path in sorted(temporary.iterdir()):
            path.replace(out / path.name)
        temporary.rmdir()
        _write(out / FINISHED, record)
    except OSError as error:
        raise TreepackError(
            f"{out}: the model cannot be written ({error.strerror or error}); make room and go on with --resume"
        ) from error


def _identity(run: Run) -> dict[str, Any]:
    """What makes two runs compute the same."""
    parts = [entry["sha256"] for entry in run.dataset.manifest["files"]]
    return {
        "format": FORMAT,
        "version": VERSION,
        "packed": str(run.dataset.path),
        "packed_sha256": hashlib.sha256("".join(parts).encode()).hexdigest(),
        "model": run.loaded.source,
        "options": run.options.fixed,
    }


def _check_same(run: Run, out: Path) -> None:
    path, expected = out / RUN, _identity(run)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        options = found["options"]
        differing = [name for name in ("format", "version", "packed_sha256", "model") if found[name] != expected[name]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TreepackError(f"{path}: is damaged ({error}); begin again with --overwrite") from error
    # A round trip through JSON, as the stored one has made.
    ours = json.loads(json.dumps(expected["options"]))
    for name in differing:
        raise TreepackError(
            f"{out}: was begun with the {name} {found[name]!r} and this run has {expected[name]!r}; resume with what "
            "it was begun with"
        )
    for name in sorted({*ours, *options}):
        if ours.get(name) != options.get(name):
            raise TreepackError(
                f"{out}: was begun with {name} {options.get(name)!r} and this run has {ours.get(name)!r}; resume with "
                "what it was begun with"
            )


def _write(path: Path, record: dict[str, Any]) -> None:
    with finished_file(path) as temporary:
        temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
