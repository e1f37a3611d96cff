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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from treepack import __version__
from treepack.errors import TreepackError
from treepack.files.directory import RUN, finished_file, refuse_existing
from treepack.files.location import first_line
from treepack.model.load import hide_progress_bars
from treepack.train.run import TrainingRun

FORMAT = "treepack-train"
VERSION = 2
FINISHED = "train.json"
_COMPARED = ("format", "version", "packed_sha256", "config_sha256")
_INCIDENTAL = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}
METRICS = "metrics.jsonl"


def check_out(out: Path, *, inputs: Iterable[str | Path], overwrite: bool, resume: bool) -> None:
    """Refuse an `out` that a run with these `inputs` may not have, before anything is loaded.

    Raises:
        TreepackError: it holds an unfinished run, a finished one, something else, or an input.
    """
    if resume and (out / RUN).exists():
        return
    if not overwrite and (out / RUN).exists() and not is_finished(out):
        raise TreepackError(f"{out} holds a run that is not complete; go on with --resume or replace it by --overwrite")
    refuse_existing(out, overwrite=overwrite, inputs=inputs)


def begin(run: TrainingRun, out: Path, *, overwrite: bool, resume: bool) -> None:
    """Make `out` the directory of `run`: new, or with `resume` the one that an equal run has left.

    Raises:
        TreepackError: `out` is in the way, or was left by a run that computes something else.
    """
    check_out(out, inputs=[run.dataset.path, run.loaded.source], overwrite=overwrite, resume=resume)
    if resume and (out / RUN).exists():
        _check_same(run, out)
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        _empty(out)
        _write(out / RUN, {**_identity(run), "treepack": __version__})
    except OSError as error:
        raise TreepackError(f"{out}: cannot be written ({error.strerror or error}); choose another --out") from error


def _empty(out: Path) -> None:
    """Remove what is in `out`, which may be a mount or a link: first what says it is complete, last that it is ours."""
    (out / FINISHED).unlink(missing_ok=True)
    for path in sorted(out.iterdir(), key=lambda path: path.name == RUN):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def is_finished(out: Path) -> bool:
    """Whether the model in `out` is complete."""
    return (out / FINISHED).exists()


def finish(run: TrainingRun, out: Path, weights: dict[str, Any] | None) -> None:
    """Write the model in its own format, and last `train.json`; an earlier attempt that was cut off is replaced.

    Args:
        run: the trained run.
        out: its directory.
        weights: the model's tensors where they are not in the model itself.

    Raises:
        TreepackError: the disk fails.
    """
    from safetensors import SafetensorError

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
        with hide_progress_bars():
            model.save_pretrained(temporary, **({} if weights is None else {"state_dict": weights}))
        if run.tokenizer is not None:
            run.tokenizer.save_pretrained(temporary)
        for path in sorted(temporary.iterdir()):
            path.replace(out / path.name)
        temporary.rmdir()
        _write(out / FINISHED, record)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise TreepackError(
            f"{out}: the model cannot be written ({first_line(error)}); make room and go on with --resume"
        ) from error


def _identity(run: TrainingRun) -> dict[str, Any]:
    """What makes two runs compute the same, but for the weights that they begin with."""
    parts = [entry["sha256"] for entry in run.dataset.manifest["files"]]
    config = {name: value for name, value in run.loaded.model.config.to_dict().items() if name not in _INCIDENTAL}
    return {
        "format": FORMAT,
        "version": VERSION,
        "packed": str(run.dataset.path),
        "packed_sha256": _sha256("".join(parts)),
        "model": run.loaded.source,
        "config_sha256": _sha256(json.dumps(config, sort_keys=True, default=str)),
        "options": run.options.fixed,
    }


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _check_same(run: TrainingRun, out: Path) -> None:
    path, expected = out / RUN, _identity(run)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        options = found["options"]
        differing = [name for name in _COMPARED if found[name] != expected[name]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TreepackError(f"{path}: is damaged ({error}); remove {out} and begin again") from error
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
