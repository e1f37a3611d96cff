"""Refuse a loss whose numbers for a term depend on other terms, which would make them depend on packing and pieces.

    16 made-up terms --surrogate--> quantities, slopes        all of them together
    each term alone  --surrogate--> quantity, slope           must be equal

A row, a piece of it and a slice of its terms are different parts of a step, so a surrogate that centres advantages or
takes a mean over its terms has another value in each. This takes milliseconds, so every run does it when it opens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from treepack.columns import BY_PACKED
from treepack.data.batch import PER_TERM, TermTensors
from treepack.errors import TreepackError, foreign_code
from treepack.objectives.needed_columns import optional_columns
from treepack.objectives.objective import Objective
from treepack.objectives.surrogates import Surrogate, TermNumbers

_NUM = 16
_TOLERANCE = 1e-9  # relative: one term alone may be rounded in another way than one of many

# Numbers by their names, from log-probabilities with a graph and the places of their terms.
_Compute = Callable[[Tensor, slice], dict[str, Any]]


def check_loss(objective: Objective) -> None:
    """Refuse a loss that computes a term, or pair, from the numbers of others.

    Raises:
        TreepackError: a number depends on other terms or on chance, has a wrong shape or dtype, or has no gradient; or
            the formula raises an error.
    """
    loss = objective.definition
    name = f"the loss {loss.name}" if loss.package is None else f"the loss {loss.name} of {loss.package}"
    generator = torch.Generator().manual_seed(0)
    current, shifts, wholes, advantages, differences = torch.randn(5, _NUM, generator=generator, dtype=torch.float64)
    current, formula = -current.abs() - 0.1, loss.surrogate
    terms = _made_up_terms(current, advantages, objective)

    def numbers_of(given: Tensor, places: slice) -> TermNumbers:
        # Views, so that a formula that changes its input changes a later result too.
        columns = {name: getattr(terms, name) for name in PER_TERM}
        part = replace(terms, **{name: each[places] for name, each in columns.items() if each is not None})
        assert part.advantage is not None
        own = None if loss.whole is None else (wholes / 10)[places]
        return TermNumbers(given, (current + shifts / 2)[places], part.advantage, part, own)

    def surrogate(given: Tensor, places: slice) -> dict[str, Any]:
        assert formula is not None
        found = formula(given if loss.over == "pairs" else numbers_of(given, places), objective)
        if loss.over == "pairs":
            return {"quantity": found}
        if not isinstance(found, Surrogate):
            raise TreepackError(f"{name}: its surrogate returns a {type(found).__name__}; expected a Surrogate")
        return {**found._asdict()}

    if loss.whole is not None:
        of = loss.whole.of
        _check_alone(name, current, lambda given, places: {"whole": of(numbers_of(given, places), objective)})
    if formula is not None:
        _check_alone(name, differences if loss.over == "pairs" else current, surrogate)


def _made_up_terms(current: Tensor, advantages: Tensor, objective: Objective) -> TermTensors:
    """Return terms of one trajectory with the columns that the objective may read, and no others."""
    read = {BY_PACKED[column].name for column in (*objective.columns, *optional_columns(objective))}
    columns: dict[str, Any] = {name: (current - 0.1).float() for name in PER_TERM if name in read}
    known: dict[str, Any] = {"sampling_logprob": None, "old_logprob": None, "ref_logprob": None, **columns}
    return TermTensors(
        tokens=torch.arange(_NUM),
        index=torch.arange(_NUM, dtype=torch.int32),
        trajectory=torch.zeros(_NUM, dtype=torch.int32),
        weight=torch.ones(_NUM, dtype=torch.float64),
        group=torch.zeros(1, dtype=torch.int32),
        reward=torch.ones(1, dtype=torch.float64),
        **{**known, "advantage": advantages.float()},
    )


def _check_alone(name: str, values: Tensor, compute: _Compute) -> None:
    """Compare the numbers of all terms together with the numbers of each term alone."""
    together = _computed(name, values, slice(0, _NUM), compute)
    for i in range(_NUM):
        for label, value in _computed(name, values, slice(i, i + 1), compute).items():
            among = together[label][i]
            if not torch.allclose(among.double(), value[0].double(), rtol=_TOLERANCE, atol=1e-12, equal_nan=True):
                raise TreepackError(
                    f"{name}: its {label} of a term depends on other terms or on chance: it is {float(among):.6g} "
                    f"among {_NUM} terms and {float(value[0]):.6g} alone, so packing and pieces would change the loss; "
                    "compute each term from its own numbers, and numbers of its trajectory by Loss.whole"
                )


def _computed(name: str, values: Tensor, places: slice, compute: _Compute) -> dict[str, Tensor]:
    """Return the numbers at some places, and the slopes of a quantity."""
    leaf, count = values.clone().requires_grad_(), len(values[places])
    with foreign_code(f"{name}: its formula fails", "repair the loss"):
        found = {label: each for label, each in compute(leaf[places], places).items() if each is not None}
        for label, each in found.items():
            expected = torch.bool if label in ("low", "high") else torch.float64
            if not isinstance(each, Tensor) or each.shape != (count,) or each.dtype != expected:
                kind = f"{[*each.shape]} of {each.dtype}" if isinstance(each, Tensor) else f"a {type(each).__name__}"
                raise TreepackError(f"{name}: its {label} of {count} terms is {kind}; expected [{count}] of {expected}")
        if "quantity" in found:
            if not found["quantity"].requires_grad:
                raise TreepackError(f"{name}: its quantity has no gradient; compute it from the log-probabilities")
            # Weights, because equal ones hide that a term has a part of the slope of each other term.
            weights = torch.arange(1.0, _NUM + 1)[places]
            found["slope"] = torch.autograd.grad((weights * found["quantity"]).sum(), leaf)[0][places]
    return {label: each.detach() for label, each in found.items()}
