"""The losses of this installation: the files of `treepack.losses`, and the losses of other packages.

    treepack/losses/gspo.py                    LOSS = Loss(name="gspo", presets={"gspo": ..., "luspo": ...}, ...)
    [project.entry-points."treepack.losses"]   of any package
    spo = "our_losses.spo:LOSS"

    own_losses()               the losses of treepack alone, for its pages
    find_loss("luspo")         the loss gspo, which has the preset luspo
    presets_of(all_losses())   {"sft": ..., "cispo": ..., ...}

Other packages are loaded only if a name is not one of treepack, or if all names are listed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from treepack.entry_points import folder_values, installed_values
from treepack.errors import TreepackError
from treepack.objectives.loss import Loss
from treepack.objectives.other_losses import OTHER_LOSSES

_FOLDER = "treepack.losses"  # and the group of entry points of other packages
_ORDER = ("weights", "terms", "pairs", "values")


@cache
def own_losses() -> tuple[Loss, ...]:
    """Return the losses of treepack: first sft, then policy losses by name, then losses of pairs, then of values."""
    return _sorted(folder_values(_FOLDER, "LOSS"))


@cache
def all_losses() -> tuple[Loss, ...]:
    """Return the losses of treepack and of other packages, in the order of `own_losses`.

    Raises:
        TreepackError: a loss of a package cannot be loaded, or two presets have one name.
    """
    found = list(own_losses())
    for loss, package in installed_values(_FOLDER, Loss, "treepack.objectives.loss"):
        known = presets_of(found)
        for name in loss.presets:
            if name in known:
                raise package.refuse_name("loss", name)
        found.append(replace(loss, package=package.title))
    return _sorted(found)


def presets_of(losses: Iterable[Loss]) -> dict[str, Loss]:
    """Return the loss of each preset."""
    return {name: loss for loss in losses for name in loss.presets}


@cache
def find_loss(preset: str) -> Loss:
    """Return the loss that has a preset.

    Raises:
        TreepackError: no loss has it; or as `all_losses`, if treepack alone does not have it.
    """
    own = presets_of(own_losses())
    if preset in own:
        return own[preset]
    known = presets_of(all_losses())
    if preset in known:
        return known[preset]
    remedy = OTHER_LOSSES.get(preset, f"expected one of {', '.join(known)}")
    raise TreepackError(f"loss is {preset!r}; {remedy}")


def _sorted(losses: Iterable[Loss]) -> tuple[Loss, ...]:
    return tuple(sorted(losses, key=lambda each: (_ORDER.index(each.over), each.name)))
