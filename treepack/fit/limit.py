"""Choose the size of pieces, and the carried tensors that stay on the GPU, from the free memory.

    CarryCosts, longest row and path, free bytes --choose_limit--> CarryPlan

Long pieces have fewer trunk tokens, which run forward twice. From 8,192 tokens on, a piece runs at the full rate of a
GPU and computes for longer than the copies of a layer take. So the first choice keeps everything on the GPU in pieces
of that size or longer. The second choice has pieces of at most that size, with as many layers and outputs of trunk in
host memory as needed. The last choice computes outputs of trunk again.
"""

from __future__ import annotations

from dataclasses import dataclass

from treepack.carry.offload import CarryBudget
from treepack.carry.pieces import ALIGNMENT, align
from treepack.carry.stack import num_offloaded
from treepack.errors import TreepackError
from treepack.memory.host_pages import CarriedBytes
from treepack.memory.shortage import gib, shortage

# Tokens of a piece; the header explains the preferred number.
SMALLEST_PIECE, PREFERRED, LARGEST_PIECE = 1024, 8192, 65_536


@dataclass(frozen=True)
class CarryCosts:
    """Bytes that rows in pieces need.

    Attributes:
        num_layers: layers with attention.
        fixed: on the GPU, whatever the number of tokens.
        piece: on the GPU for each token of a piece: activations of all layers, and gradients of a layer.
        keys_values: keys and values for each token and layer.
        sums: sums of their gradients for each carried token and layer.
        output: output of attention for each carried token and layer.
        lse: its log-sum-exp for each carried token and layer, which stays on the GPU.
        state: states of recurrent layers and sums of their gradients, per branch point of the path.
    """

    num_layers: int
    fixed: int
    piece: int
    keys_values: int
    sums: int
    output: int
    lse: int = 0
    state: int = 0


@dataclass(frozen=True)
class CarryPlan:
    """The plan of the carried rows of a run.

    Attributes:
        limit: tokens of a piece.
        resident_layers: layers whose carried tensors stay on the GPU with the longest path.
        keep_outputs: True if all outputs of trunk are kept from push to pop with the longest path.
        budget: the bytes of `CarryMemory`.
        peak: additional bytes on the GPU, and bytes in host memory, with the longest path.
    """

    limit: int
    resident_layers: int
    keep_outputs: bool
    budget: CarryBudget
    peak: CarriedBytes


def choose_limit(
    longest_row: int,
    longest_path: int,
    costs: CarryCosts,
    *,
    gpu_bytes: int,
    host_bytes: int,
    limit: int | None = None,
) -> CarryPlan:
    """Return the plan for rows of at most `longest_row` tokens with paths of at most `longest_path`.

    Args:
        longest_row: tokens.
        longest_path: tokens, with the unused places of the stack if they are many.
        costs: bytes per token.
        gpu_bytes: bytes that may be used on the GPU.
        host_bytes: bytes of host memory that may be used.
        limit: tokens of a piece if they are given; else a multiple of 128 from 1,024 to 65,536.

    Raises:
        TreepackError: the rows do not fit with any size of pieces.
    """
    room = CarriedBytes(gpu_bytes, host_bytes)
    if limit is not None:
        plan = _plan(limit, longest_row, longest_path, costs, room)
        if plan is None:
            raise _refusal(limit, longest_row, longest_path, costs, room)
        return plan
    largest = min(LARGEST_PIECE, max(SMALLEST_PIECE, align(longest_row)))
    sizes = range(largest, SMALLEST_PIECE - 1, -ALIGNMENT)  # the longest first, which has the fewest trunk tokens
    plans = [_plan(size, longest_row, longest_path, costs, room) for size in sizes]
    fitting = [plan for plan in plans if plan is not None]
    kept = [plan for plan in fitting if plan.keep_outputs]
    choices = [plan for plan in kept if plan.peak.host == 0 and plan.limit >= min(PREFERRED, largest)]
    choices += [plan for plan in kept if plan.limit <= PREFERRED]
    choices += [plan for plan in fitting if plan.limit <= PREFERRED]
    if not choices:
        raise _refusal(SMALLEST_PIECE, longest_row, longest_path, costs, room)
    return choices[0]


def _plan(limit: int, longest_row: int, longest_path: int, costs: CarryCosts, room: CarriedBytes) -> CarryPlan | None:
    """Return the plan for one size of pieces; None if it does not fit."""
    layers, activations = costs.num_layers, costs.fixed + costs.piece * min(limit, longest_row)
    if longest_row <= limit:  # nothing is carried
        fits = activations <= room.gpu
        return CarryPlan(limit, layers, True, CarryBudget(), CarriedBytes(activations, 0)) if fits else None
    carried, size = align(longest_path), _layer_bytes(limit, longest_path, costs)
    # The gradients of keys and values of one layer are there for a moment.
    left = room.gpu - activations - carried * layers * costs.lse - (carried + align(limit)) * costs.keys_values
    offloaded = num_offloaded(left, size, layers)
    on_gpu = (layers - offloaded + min(2, offloaded)) * size
    in_host = offloaded * carried * (costs.keys_values + costs.sums)
    if on_gpu > left or in_host > room.host:
        return None
    outputs = layers * carried * costs.output
    outputs_on_gpu = min(outputs, left - on_gpu)
    host_outputs = room.host - in_host
    keeps = outputs - outputs_on_gpu <= host_outputs
    in_host += min(outputs - outputs_on_gpu, host_outputs)
    # The stack gets the rest of the room, for paths with unused places.
    budget = CarryBudget(stack=left - outputs_on_gpu, outputs=outputs_on_gpu, host_outputs=host_outputs)
    peak = CarriedBytes(room.gpu - left + on_gpu + outputs_on_gpu, in_host)
    return CarryPlan(limit, layers - offloaded, keeps, budget, peak)


def _layer_bytes(limit: int, longest_path: int, costs: CarryCosts) -> int:
    """Return the bytes of a layer's buffer: keys and values of the stack and the piece, sums of the stack."""
    carried = align(longest_path)
    return (carried + align(limit)) * costs.keys_values + carried * costs.sums


def _refusal(limit: int, longest_row: int, longest_path: int, costs: CarryCosts, room: CarriedBytes) -> TreepackError:
    gpu = costs.fixed + costs.piece * min(limit, longest_row)
    host = 0
    if longest_row > limit:
        carried = align(longest_path)
        gpu += 2 * _layer_bytes(limit, longest_path, costs) + carried * costs.num_layers * costs.lse
        gpu += (carried + align(limit)) * costs.keys_values
        host = costs.num_layers * carried * (costs.keys_values + costs.sums)
    subject = f"carry: a row of {longest_row:,} tokens, {longest_path:,} of them on one path,"
    needed = f"{gib(gpu)} of GPU memory and {gib(host)} of host memory in pieces of {limit:,}"
    free = f"{gib(max(0, room.gpu))} and {gib(max(0, room.host))}"
    remedy = "truncate the longest trajectories, train with LoRA, or use a machine with more memory"
    return TreepackError(shortage(subject, needed, free, remedy))
