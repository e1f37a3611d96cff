"""Slow, obvious twins of the data half, written from the definitions and sharing no code with it.

dict_trie     one Python dict per token
visible       the tokens that a token may see, by chasing parents
union_tokens  tokens of the union of some root-to-end paths, as a set of prefixes
best_plan     the minimum total of rows, by trying every assignment
unique_names  ids made unique, one after the other
best_fit_decreasing   rows that the heuristic of that name opens
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

Path = Sequence[int]


def dict_trie(sequences: Sequence[Path]) -> dict[int, dict]:  # type: ignore[type-arg]
    """Nested dictionaries token -> children."""
    root: dict[int, dict] = {}  # type: ignore[type-arg]
    for sequence in sequences:
        node = root
        for token in sequence:
            node = node.setdefault(token, {})
    return root


def count_tokens(trie: dict[int, dict]) -> int:  # type: ignore[type-arg]
    """Tokens of a `dict_trie`, without recursion."""
    total, open_nodes = 0, [trie]
    while open_nodes:
        children = open_nodes.pop()
        total += len(children)
        open_nodes.extend(children.values())
    return total


def visible(parent: Sequence[int], q: int) -> set[int]:
    """Row indices that token q may see: itself and its ancestors."""
    seen = set()
    while q >= 0:
        seen.add(q)
        q = parent[q]
    return seen


def path_of(parent: Sequence[int], end: int) -> list[int]:
    """Row indices from the root to `end`."""
    return sorted(visible(parent, end))


def union_tokens(sequences: Sequence[Path]) -> int:
    """Distinct non-empty prefixes: the tokens of one row that holds all of `sequences`."""
    return len({tuple(sequence[:n]) for sequence in sequences for n in range(1, len(sequence) + 1)})


def best_plan(sequences: Sequence[Path], capacity: int) -> tuple[int, int]:
    """Least (total tokens, rows) over all partitions into rows of at most `capacity` tokens; at most 8 sequences."""
    best = (10**18, 10**18)

    def place(i: int, rows: list[list[Path]]) -> None:
        nonlocal best
        if i == len(sequences):
            best = min(best, (sum(map(union_tokens, rows)), len(rows)))
            return
        for k in range(len(rows) + 1):
            grown = [*rows[:k], [*(rows[k] if k < len(rows) else []), sequences[i]], *rows[k + 1 :]]
            if union_tokens(grown[k]) <= capacity:
                place(i + 1, grown)

    place(0, [])
    return best


def unique_names(names: Sequence[str], sources: Sequence[str]) -> list[str]:
    """`names`; repeated ones get their source and, if that is taken too, the next free number, by source and id."""
    counts = Counter(names)
    result = [name if counts[name] == 1 else f"{name}@{source}" for name, source in zip(names, sources, strict=True)]
    taken: set[str] = set()
    for i in sorted(range(len(names)), key=lambda i: (sources[i], names[i])):
        name, number = result[i], 1
        while result[i] in taken:
            number += 1
            result[i] = f"{name}#{number}"
        taken.add(result[i])
    return result


def best_fit_decreasing(sizes: Sequence[int], capacity: int) -> int:
    """Rows that best fit decreasing opens, by asking every row for every size."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting, key=rooms.__getitem__)] -= size
        else:
            rooms.append(capacity - size)
    return len(rooms)


def tiles(subtree_end: Sequence[int], block: int) -> tuple[int, int]:
    """Partial and full tiles of a mask, pair by pair; padding to whole blocks sees only itself."""
    num = -(-len(subtree_end) // block) * block
    ends = [*subtree_end, *range(len(subtree_end) + 1, num + 1)]
    partial = full = 0
    for i in range(0, num, block):
        for j in range(0, i + 1, block):
            seen = [k <= q < ends[k] for q in range(i, i + block) for k in range(j, j + block)]
            full += all(seen)
            partial += any(seen) and not all(seen)
    return partial, full
