"""Models whose rows cannot run in pieces, refused by name before the first step."""

from __future__ import annotations

from treepack.errors import TreepackError
from treepack.model.experts.routers import follow_routers
from treepack.model.loaded import LoadedModel


def check_carry(loaded: LoadedModel) -> None:
    """Refuse a model, or its attention, that cannot run rows in pieces.

    From now on the routers of a mixture are followed (`routes`): before the first step, so that a resumed run compiles
    the same layers.

    Raises:
        TreepackError: naming the reason.
    """
    if (reason := _obstacle(loaded)) is not None:
        raise TreepackError(f"{loaded.source}: --carry cannot cut its rows into pieces, because {reason}")
    follow_routers(loaded.causal)


def can_carry(loaded: LoadedModel) -> bool:
    """Return True if a model can run rows in pieces; then its routers are followed from now on."""
    try:
        check_carry(loaded)
    except TreepackError:
        return False
    return True


def _obstacle(loaded: LoadedModel) -> str | None:
    """Return why a model, or its attention, computes only whole rows, and the remedy; None if it can run pieces."""
    config = loaded.causal.config.get_text_config()
    # Zamba 2: hybrid layers take turns with a few attention modules, and keys are carried by module.
    modules, layers = getattr(config, "num_mem_blocks", None), getattr(config, "hybrid_layer_ids", None)
    if modules is not None and layers is not None and modules < len(layers):
        return f"{len(layers)} of its layers share {modules} attention modules; run this model without --carry"
    if loaded.attention == "flash":
        return "flash computes as many queries as keys; give --attention triton or flex"
    return None
