"""Attention over packed trees: one integer per token is the whole mask.

dispatch    tree_attention, by any implementation; what each prepares once per row; which one suits
reference   obvious, any device, float64; the twin of every other implementation
flex        FlexAttention over block lists made from the intervals; compiled on an accelerator
flash       the same block lists through FlexAttention's FlashAttention-4 backend
chains      rows in which nothing branches, through varlen FlashAttention
schedule    lists of tiles for the project's own kernels
kernel      those kernels, in Triton
interface   all under transformers' names, and the refusal of everything else a model may ask for

Triton is imported when a kernel first runs, never before.
"""

from treepack.attention.autograd import Kept
from treepack.attention.dispatch import NAMES, obstacle, prepare, resolve, row_multiple, takes_chains, tree_attention
from treepack.attention.flex import build_block_mask, flex_attention
from treepack.attention.interface import IMPLEMENTATIONS, register
from treepack.attention.reference import reference_attention, visible_pairs

__all__ = [
    "IMPLEMENTATIONS",
    "NAMES",
    "Kept",
    "build_block_mask",
    "flex_attention",
    "obstacle",
    "prepare",
    "reference_attention",
    "register",
    "resolve",
    "row_multiple",
    "takes_chains",
    "tree_attention",
    "visible_pairs",
]
