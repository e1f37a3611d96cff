"""Which states of a node are worth keeping. Import this module only where it is called: numba takes a while to load.

State a makes state b superfluous if it costs no more and its traversals can replace different ones of b, each of which
has no more left:

    a  has left  5  9        b  has left  4  7  8        5 >= 4 and 9 >= 7: any plan with b is as good with a

In a plan with b, put the traversals of a in the place of those, and take the others of b out. Rows only get emptier,
none is added, no ancestor is paid for more often, and the leaves below the node are still all there. It is enough to
try the traversals of b with least left, in order; so b is superfluous if, with absent traversals of infinite size,
a >= b in every place. Partial states, of the first children of a node, compare just the same.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from treepack.pack.plan.methods.completion import IMPOSSIBLE, State
from treepack.trajectory import Int64

COMPARED = 3000  # states at most with which another one is compared: more cost more than they save
COMPARISONS = 100_000_000  # of all states at most: about half a second


def undominated(states: list[State]) -> list[State]:
    """States that no other is at least as good as, cheapest first."""
    states.sort(key=lambda state: (state[0], len(state[1]), [-room for room in state[1]]))
    if len(states) < 2:
        return states
    width = max(len(rooms) for _, rooms in states)
    padded = np.full((len(states), width), IMPOSSIBLE)
    for i, (_, rooms) in enumerate(states):
        padded[i, : len(rooms)] = rooms
    return [states[i] for i in np.flatnonzero(_best_of(padded, min(COMPARED, COMPARISONS // len(states)))).tolist()]


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _best_of(rooms: Int64, compared: int) -> NDArray[np.bool_]:
    """Which rows are not <= an earlier one in every place; those that rule out others are asked sooner."""
    num, width = rooms.shape
    best = np.zeros(num, np.bool_)
    kept = np.zeros(num, np.int64)
    num_kept = 0
    for i in range(num):
        dominated = False
        for at in range(min(num_kept, compared)):
            j = kept[at]
            k = 0
            while k < width and rooms[j, k] >= rooms[i, k]:
                k += 1
            if k == width:
                dominated = True
                kept[at], kept[at // 2] = kept[at // 2], kept[at]
                break
        if not dominated:
            best[i] = True
            kept[num_kept] = i
            num_kept += 1
    return best
