"""Drop states of a node that another state dominates.

`traversals.py` explains states and traversals. State a dominates state b if a costs no more than b, and each traversal
of a has a partner: a different traversal of b with at most as much room.

    rooms of a   5  9        rooms of b   4  7  8        5 >= 4 and 9 >= 7, so any plan with b is as good with a

In a plan with b, replace each partner by its traversal of a, and remove the other traversals of b. Then no row gets
longer and no row is added, no ancestor is repeated in more rows, and all leaves below the node are still in rows. It is
enough to try the traversals of b with the smallest rooms, in order. So with missing traversals of infinite room, a
dominates b if a >= b in every component. States of only the first children of a node are compared in the same way.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treepack.native.library import BOOL, INT, INT64, in_c
from treepack.pack.plan.methods.completion import IMPOSSIBLE, State
from treepack.trajectory import Int64

_MAX_COMPARED = 3000  # states with which a state is compared: more comparisons cost more than they save
_MAX_COMPARISONS = 100_000_000  # of all states together: about half a second


def drop_dominated(states: list[State]) -> list[State]:
    """Return the states that no other state dominates, cheapest first. Sorts `states`."""
    # By rising cost, rising number of traversals and falling room: a state can only be dominated by an earlier one.
    states.sort(key=lambda state: (state[0], len(state[1]), [-room for room in state[1]]))
    if len(states) < 2:
        return states
    width = max(len(rooms) for _, rooms in states)
    # A missing traversal has infinite room: rooms (5, 9) and (4, 7, 8) -> [5, 9, IMPOSSIBLE], [4, 7, 8]; the first is
    # >= the second in every component.
    padded = np.full((len(states), width), IMPOSSIBLE)
    for i, (_, rooms) in enumerate(states):
        padded[i, : len(rooms)] = rooms
    compared = min(_MAX_COMPARED, _MAX_COMPARISONS // len(states))
    best = np.zeros(len(states), np.bool_)
    best_of(padded, compared, np.zeros(len(states), np.int64), best)
    return [states[i] for i in np.flatnonzero(best).tolist()]


@in_c(INT64, INT, INT64, BOOL)
def best_of(rooms: Int64, compared: int, candidates: Int64, best: NDArray[np.bool_]) -> None:
    """Set `best` bool [states] where a row of `rooms` int64 [states, width] is not <= an earlier one in every place.

    Rows that rule out others move forward in the list, so that they are compared sooner. At most `compared` are.
    `candidates` int64 [states] is scratch.
    """
    num, width = rooms.shape
    num_candidates = 0
    for i in range(num):
        dominated = False
        for at in range(min(num_candidates, compared)):
            j = candidates[at]
            k = 0
            while k < width and rooms[j, k] >= rooms[i, k]:
                k += 1
            if k == width:
                dominated = True
                candidates[at], candidates[at // 2] = candidates[at // 2], candidates[at]
                break
        if not dominated:
            best[i] = True
            candidates[num_candidates] = i
            num_candidates += 1
