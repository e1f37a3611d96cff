"""Every causal language model type of transformers: exact on trees, or refused, and by what reason.

    PYTHONPATH=tests python benchmarks/model_sweep.py [--types qwen3,gemma2] > sweep.md

    type --small random configuration, windows of 16 tokens--> load_model --> gradients of two packed rows
                                                                          --> gradients of 12 trajectories alone

The model has two layers, one of each kind that the type has, and weights of order one, in float64 on the CPU. The
trajectories branch, and the longest has 66 tokens, so that a window or chunk of 16 tokens leaves most tokens out. A
type is exact if no parameter's gradient differs by more than 1e-9. Prints two Markdown tables, after the versions and
the counts. The exit status is 1 if a type was accepted and is wrong, or ended in another exception.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from support.oracle_model import VOCABULARY
from support.tiny_families import family_config, spread_weights, tiny_family, transformers_types
from treepack import PackOptions, TreepackError
from treepack.attention import register
from treepack.attention.interface import AttentionKind
from treepack.data.batch import Batch, make_batch
from treepack.ingest.array_rollouts import trajectories_from_arrays
from treepack.model.accept.compatibility import check_fits
from treepack.model.load import load_model
from treepack.model.verify.gradients import verify_gradients
from treepack.pack.packing import plan_packing
from treepack.trie.builders.in_memory import build_trie

SIZE = 16  # tokens of windows and chunks
LARGE_ERROR = 1e-12  # of gradients in float64; larger ones are named
LONGEST = 66  # tokens of the longest trajectory


class Outcome(NamedTuple):
    """Result for a type: "exact", "refused", "not made", "WRONG" or "FAILED", and the error or the reason."""

    word: str
    detail: str
    kinds: frozenset[AttentionKind] = frozenset()


def batches() -> list[Batch]:
    """Return two rows of 12 trajectories: each continues a prefix of an earlier one."""
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, VOCABULARY, LONGEST)]
    while len(sequences) < 12:
        base = sequences[int(rng.integers(len(sequences)))]
        cut = int(rng.integers(0, len(base)))
        rest = int(rng.integers(1, LONGEST - cut + 1))
        sequences.append(np.concatenate([base[:cut], rng.integers(0, VOCABULARY, rest)]))
    masks = [[0, *rng.integers(0, 2, len(tokens) - 2), 1] if len(tokens) > 1 else [0] for tokens in sequences]
    trie = build_trie(trajectories_from_arrays(sequences, masks))
    return [make_batch(row) for row in plan_packing(trie, PackOptions(capacity=256))]


def fields_of(kind: str) -> Iterator[dict[str, Any]]:
    """Yield the options of a type to try, most kinds of layers first; the last are its own defaults."""
    config = family_config(kind)
    full = type(config)().layer_types if getattr(config, "layer_types", None) else []
    fields: dict[str, Any] = {}
    if isinstance(getattr(config, "sliding_window", None), int):
        fields |= {"sliding_window": SIZE}
    if isinstance(getattr(config, "attention_chunk_size", None), int):
        fields |= {"attention_chunk_size": SIZE}
    distinct = list(dict.fromkeys(full))
    if len(distinct) > 1:  # one layer of each of the first two kinds
        yield {**fields, "layer_types": distinct[:2]}
    elif distinct == ["full_attention"]:  # Qwen 2: windows are an option
        yield {"use_sliding_window": True, "sliding_window": SIZE, "layer_types": ["sliding_attention", *distinct]}
    if fields:
        yield fields
    yield {}


def examine(kind: str, rows: list[Batch]) -> Outcome:
    """Make a model of the type, and compare its gradients on `rows` with the trajectories alone."""
    problem = "no configuration"
    try:
        tried = list(fields_of(kind))
    except Exception as error:  # code of transformers
        return Outcome("not made", first_line(error))
    for fields in tried:
        try:
            # As transformers runs it: some options make a model that cannot run at all.
            tiny_family(kind, **fields)(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
        except Exception as error:  # code of transformers
            problem = first_line(error)
        else:
            return _compare(kind, fields, rows)
    return Outcome("not made", problem)


def _compare(kind: str, fields: dict[str, Any], rows: list[Batch]) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(family_config(kind, **fields).to_dict(), default=str))
        try:
            loaded = load_model(path, dtype=torch.float64)
            check_fits(loaded, max_token_id=VOCABULARY - 1, tokenizer=None, max_position=LONGEST - 1)
            torch.manual_seed(0)
            spread_weights(loaded.model)
            report = verify_gradients(loaded, rows)
        except TreepackError as error:
            return Outcome("refused", str(error).removeprefix(f"{path}: ").partition(";")[0])
        except Exception as error:
            return Outcome("FAILED", first_line(error))
    verdict = "exact" if report.passed else "WRONG"
    return Outcome(verdict, f"{max(report.worst[1], report.loss_error):.1e}", frozenset(loaded.kinds))


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message, at most 120 characters of it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def variants(kinds: frozenset[AttentionKind]) -> str:
    """Return the names of windows, chunks, sinks, caps and other dimensions of values."""
    # Reach("window", 16) and has_sinks -> "sinks, window 16"
    names = {f"{kind.reach.kind} {kind.reach.size}" for kind in kinds if kind.reach is not None}
    names |= {"sinks" for kind in kinds if kind.has_sinks} | {"score cap" for kind in kinds if kind.softcap}
    names |= {"value width" for kind in kinds if len(set(kind.head_dims)) > 1}
    return ", ".join(sorted(names))


def main() -> int:
    """Run the sweep and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", help="comma-separated; all by default")
    chosen = parser.parse_args().types
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    register()
    rows, outcomes = batches(), {}
    for kind in chosen.split(",") if chosen else transformers_types():
        start = time.monotonic()
        outcomes[kind] = examine(kind, rows)
        print(f"{kind}: {' '.join(outcomes[kind][:2])} ({time.monotonic() - start:.1f} s)", file=sys.stderr, flush=True)
    counts = Counter(outcome.word for outcome in outcomes.values())
    print(f"transformers {transformers.__version__}, torch {torch.__version__}: {len(outcomes)} types, ", end="")
    print(", ".join(f"{count} {word}" for word, count in sorted(counts.items())))
    rows_of_table = [
        (kind, variants(each.kinds), each.detail) for kind, each in outcomes.items() if each.word == "exact"
    ]
    print("\n".join(tables(rows_of_table, {k: each for k, each in outcomes.items() if each.word != "exact"})))
    return 1 if counts["WRONG"] or counts["FAILED"] else 0


def tables(exact: list[tuple[str, str, str]], others: dict[str, Outcome]) -> list[str]:
    """Return a sentence with the exact types, and a table of the other types by outcome and reason."""
    names = [f"`{kind}`" + (f" ({error})" if float(error) > LARGE_ERROR else "") for kind, _, error in exact]
    lines = ["", f"Exact, with the largest error beside those above {LARGE_ERROR:g}: {', '.join(names)}."]
    lines += ["", "| outcome | reason | types |", "|---|---|---|"]
    groups: dict[tuple[str, str], list[str]] = {}
    for kind, (word, detail, _) in others.items():
        # "layer 1 is 'conv', which is ..., and treepack ..." -> "layer is 'conv', which is ..."
        detail = re.sub(r"^transformers cannot load it with tree attention \((.*)\)$", r"\1", detail)
        reason = re.sub(r"layer \d+", "layer", detail.partition(", and treepack")[0]).partition(" (")[0]
        reason = "transformers cannot run the small configuration" if word == "not made" else reason
        reason = re.sub(r"^\w+ of layer: ", "", reason).replace("|", "/")
        groups.setdefault((word, reason), []).append(f"`{kind}`")
    lines += [f"| {word} | {reason} | {', '.join(kinds)} |" for (word, reason), kinds in sorted(groups.items())]
    return lines


if __name__ == "__main__":
    sys.exit(main())
