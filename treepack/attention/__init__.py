"""Attention over packed trees: one integer per token is the whole mask.

dispatch       tree_attention by any implementation, and the choice among them
schedules      the schedule of each implementation, for one layer or for a whole model
interface      all implementations under transformers' names, and the refusal of every other request of a model
generation     plain calls of the same model through sdpa, for sampling and evaluation
reference      simple code for any device and float64; every other implementation is tested against it
flex           FlexAttention over block lists made from the intervals; compiled on an accelerator
flash          the same block lists through FlexAttention's FlashAttention-4 backend
chains         rows in which nothing branches, through varlen FlashAttention
reach          windows and chunks, as the first token that each token sees
schedule       lists of tiles for the project's own kernels
key_shares     long key blocks of those lists, divided between programs of the backward
narrow         those lists for layers with windows and chunks
naive          those kernels in plain torch, to read and to test against
portable       those kernels in Triton, for any GPU
hopper         those kernels in Gluon, for Hopper GPUs
kernel_launch  the arguments of one launch, shared by both
autograd       forward and backward kernels as one function that torch differentiates

Triton is imported when a kernel first runs, never before.
"""

from treepack.attention.autograd import KeptOutputs
from treepack.attention.dispatch import (
    NAMES,
    BatchSchedules,
    obstacle,
    prepare,
    resolve,
    row_multiple,
    takes_chains,
    tree_attention,
)
from treepack.attention.flex import build_block_mask, flex_attention
from treepack.attention.generation import allow_generation
from treepack.attention.interface import IMPLEMENTATIONS, TreePass, register
from treepack.attention.reach import KeyReach, first_visible
from treepack.attention.reference import reference_attention, visible_pairs

__all__ = [
    "IMPLEMENTATIONS",
    "NAMES",
    "BatchSchedules",
    "KeptOutputs",
    "KeyReach",
    "TreePass",
    "allow_generation",
    "build_block_mask",
    "first_visible",
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
