"""Losses, a file each; `treepack.objectives.registry` finds them, and nothing imports them."""
