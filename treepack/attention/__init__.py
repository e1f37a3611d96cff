"""Attention over packed trees: one integer per token is the whole mask.

reference   obvious, any device, float64; the twin of every other backend
flex        FlexAttention over block lists made from the intervals; compiled on an accelerator
interface   both under transformers' names, and the refusal of everything else a model may ask for
"""

from treepack.attention.flex import build_block_mask, flex_attention
from treepack.attention.interface import IMPLEMENTATIONS, register
from treepack.attention.reference import reference_attention, visible_pairs

__all__ = [
    "IMPLEMENTATIONS",
    "build_block_mask",
    "flex_attention",
    "reference_attention",
    "register",
    "visible_pairs",
]
