"""The table of supported models, of docs/models.md and `treepack models`, from the table that the tests prove.

    support.model_table --dispatch, as on an H100 in bf16--> treepack/analysis/families.json, lines of docs/models.md

`dispatch` and `autograd` choose the kernels. No GPU is needed: tensors are fake, and the two properties of a GPU that
the choice depends on (Hopper or not, shared memory) are those of an H100.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from treepack.attention import autograd, dispatch
from treepack.attention.interface import AttentionKind

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.model_table import (
    ACCEPTED,
    CHANGED_SINCE_OLDER,
    LACKED_BY_OLDER,
    READ_BY_VLLM,
    REFUSED,
    UNREAD_FROM_OLDER,
    Family,
)

_H100_SHARED_MEMORY = 227  # KiB that one program may have
_LABELS = {"hopper": "Hopper", "portable": "Triton"}


def accepted() -> str:
    """Return the table of accepted families in Markdown, by name."""
    lines = [
        "| family | example | type | head dimensions | attention | kernels | beside it |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in _records():
        if not each["refused"]:
            cells = (each["name"], f"`{each['example']}`", f"`{each['type']}`")
            lines.append(
                f"| {' | '.join((*cells, *(each[name] for name in ('heads', 'attention', 'kernels', 'beside'))))} |"
            )
    return "\n".join(lines) + "\n"


def families() -> str:
    """Return the content of treepack/analysis/families.json."""
    return json.dumps(_records(), indent=1) + "\n"


@cache
def _records() -> list[dict[str, str]]:
    """Return the fields of each `ModelFamily`: accepted families by name, then refused ones."""
    records = []
    for family in sorted(ACCEPTED, key=lambda each: each.name.casefold()):
        kinds = family.attention
        records.append(
            {
                "name": family.name,
                "example": family.example,
                "type": family.kind,
                "heads": _unique(map(_dims, kinds)),
                "attention": _variants(kinds),
                "kernels": _kernels(kinds),
                "beside": ", ".join(filter(None, (family.recurrent, family.note))),
                "refused": "",
            }
        )
    refused = [
        {"name": each.name, "example": each.example, "type": each.kind, "refused": _reason(each)} for each in REFUSED
    ]
    return records + refused


def copies() -> str:
    """Return the table of the programs that read saved copies in Markdown."""
    rows: dict[str, frozenset[str]] = {
        "transformers 5.24; 4.57 lacks the family": LACKED_BY_OLDER,
        "transformers 5.24; 4.57 computes other values, from an untrained source too": CHANGED_SINCE_OLDER,
        "transformers 5.24, which cannot read a source that 4.57 wrote": UNREAD_FROM_OLDER,
    }
    names = [each.name for each in ACCEPTED]
    both = frozenset(names).difference(*rows.values())
    rows = {"transformers 4.57 and 5.24": both, **rows, "also vLLM 0.32": frozenset(READ_BY_VLLM)}
    lines = ["| read by | families |", "|---|---|"]
    lines += [f"| {reader} | {', '.join(name for name in names if name in some)} |" for reader, some in rows.items()]
    return "\n".join(lines) + "\n"


def refused() -> str:
    """Return the table of refused families in Markdown."""
    lines = ["| family | type | reason |", "|---|---|---|"]
    lines += [f"| {each.name} | `{each.kind}` | {_reason(each)} |" for each in REFUSED]
    return "\n".join(lines) + "\n"


def _reason(family: Family) -> str:
    # "carries ..." is about a layer, "does not pass ..." about the code, and "its ..." names its own subject.
    first = family.refusal.split()[0]
    if first in ("it", "its"):
        return family.refusal
    subject = "a layer" if first in ("carries", "compresses") else "its code"
    return f"{subject} {family.refusal}"


def _unique(names: object) -> str:
    return ", ".join(dict.fromkeys(names))  # type: ignore[call-overload]


def _dims(kind: AttentionKind) -> str:
    # (192, 128) -> "192/128", (64, 64) -> "64"
    return "/".join(map(str, dict.fromkeys(kind.head_dims)))


def _variants(kinds: tuple[AttentionKind, ...]) -> str:
    """Return the variants of attention in the layers, such as "full, window, sinks"."""
    names = []
    for kind in kinds:
        names.append("full" if kind.reach is None else kind.reach.kind)
        names += ["sinks"] * kind.has_sinks + ["score cap"] * (kind.softcap is not None)
    # Full and window first, then sinks and caps, which layers of both kinds may have.
    return _unique(sorted(names, key=("sinks", "score cap").__contains__))


def _kernels(kinds: tuple[AttentionKind, ...]) -> str:
    """Return the kernels of an H100 in bf16, one word if all layers have the same."""
    of_kinds = [(kind, kernel_of(kind)) for kind in kinds]
    if len({kernel for _, kernel in of_kinds}) == 1:
        return of_kinds[0][1]
    return ", ".join(f"{kernel} ({'full' if kind.reach is None else kind.reach.kind})" for kind, kernel in of_kinds)


def kernel_of(kind: AttentionKind) -> str:
    """Return the implementation that runs such a layer on an H100 in bf16: Hopper, Triton or another name."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    with (
        patch.object(autograd, "has_hopper", lambda _: True),
        patch.object(dispatch, "_shared_memory", lambda _: _H100_SHARED_MEMORY),
        FakeTensorMode(),
    ):
        impl = next(
            impl
            for impl in dispatch.AUTO["cuda"]
            if impl != "flash" and dispatch.obstacle(impl, device, dtype, kind.head_dims, plain=kind.is_plain) is None
        )
        if impl != "triton":
            return impl
        query, value = (torch.empty(1, 1, 1, size, device=device, dtype=dtype) for size in kind.head_dims)
        return _LABELS[autograd.backend(query, value, capped=kind.softcap is not None)]
