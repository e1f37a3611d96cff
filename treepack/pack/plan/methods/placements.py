"""All ways to place the traversals of the next child: each joins a different traversal so far, or none.

    rooms 3 5 of the traversals so far, room 8 of their node, item 6    join the 5: 3 3    or new: 3 5 6

`traversals.py` explains rooms, rounding and exact fits.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from treepack.pack.plan.methods.completion import Rooms

NEW = -1
# The new rooms, and for each item the index of the earlier traversal that it joins, or NEW.
_Placement = tuple[Rooms, tuple[int, ...]]


class RoundedRooms(dict[int, int]):
    """A cache of rounded rooms: each room is rounded down to the largest sum of tokens that may still be added."""

    def __init__(self, sums: int | None) -> None:
        super().__init__()
        self.sums = sums

    def __missing__(self, left: int) -> int:
        # sums {0, 3, 6} = 0b1001001, left 5: keep the bits 0 to 5 -> 0b001001, whose highest bit is 3
        rounded = left if self.sums is None else (self.sums & ((2 << left) - 1)).bit_length() - 1
        self[left] = rounded
        return rounded


def placements(
    rooms: Rooms, rounded: list[int], items: Rooms, most_new: int, room: int, rounding: RoundedRooms
) -> Iterator[_Placement]:
    """Yield every way to place the traversals `items` of a child: each joins a different one of `rooms` or is new.

    At most `most_new` of them are new. Of equal rooms only the first is tried. Yields the new rooms, and for each item
    the index in `rooms` or NEW. In the new rooms, a room that no item joins has its value from `rounded`.
    """
    item = items[0]
    if len(items) == 1:
        previous = -1
        for place, left in enumerate(rooms):
            if left == previous or left + item < room:
                continue
            previous = left
            # rooms [3, 5], room 8, item 6 -> join the 5: 5 + 6 - 8 = 3 left -> [3, 3]; or new: [3, 5, 6]
            result = rounded[:place] + rounded[place + 1 :]
            insort(result, rounding[left + item - room])
            yield tuple(result), (place,)
            if left + item == room:  # an exact fit: nothing else can be better
                return
        if most_new:
            result = rounded.copy()
            insort(result, rounding[item])
            yield tuple(result), (NEW,)
        return
    yield from _of_many(rooms, rounded, items, most_new, room, rounding)


def _of_many(
    rooms: Rooms, rounded: list[int], items: Rooms, most_new: int, room: int, rounding: RoundedRooms
) -> Iterator[_Placement]:
    """Yield the placements of several items: the same as `placements`, by depth-first search over the items."""
    num, end = len(items), len(rooms)
    places: list[int] = []
    free = [True] * end

    def place_next(most_new: int) -> Iterator[_Placement]:
        at = len(places)
        if at == num:
            result = [rounded[i] for i in range(end) if free[i]]
            result += [
                rounding[item if place == NEW else rooms[place] + item - room]
                for item, place in zip(items, places, strict=True)
            ]
            result.sort()
            yield tuple(result), tuple(places)
            return
        item = items[at]
        begin = 0
        if at and items[at - 1] == item:  # equal ones in ascending places, new ones last
            begin = places[-1] + 1 if places[-1] != NEW else end
        previous = -1
        for place in range(begin, end):
            left = rooms[place]
            if not free[place] or left == previous or left + item < room:
                continue
            previous = left
            free[place] = False
            places.append(place)
            yield from place_next(most_new)
            places.pop()
            free[place] = True
            if left + item == room:
                return
        if most_new:
            places.append(NEW)
            yield from place_next(most_new - 1)
            places.pop()

    yield from place_next(most_new)


def placements_of_closed(rooms: Rooms, items: Rooms, room: int) -> Iterator[_Placement]:
    """Yield the best placement if nothing can be added later: as many items as possible join a traversal."""
    # The item with the largest room joins the first traversal with room for it: rooms (2, 5), items (4, 7), room 8 ->
    # 7 joins the 2 (2 + 7 >= 8), 4 joins the 5 (5 + 4 >= 8) -> places [1, 0].
    places = [NEW] * len(items)
    widest = len(items) - 1
    for place, left in enumerate(rooms):
        if widest < 0:
            break
        if left + items[widest] >= room:
            places[widest] = place
            widest -= 1
    num = len(rooms) + places.count(NEW)
    yield (0,) * num, tuple(places)
