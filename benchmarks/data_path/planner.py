"""`auto` against greedy-online and contiguous: tokens and processor time, before and after.

    python benchmarks/data_path/planner.py [--before REVISION] [--leaves 1000] [--effort low]

One line for each family of `families.py` at `--leaves`, then one for each family of stars at 100,000 leaves. `over` is
the tokens over the certified bound in percent, and `auto / greedy` the ratio of processor times of planning alone, with
all code loaded. The rollouts arrive in random order. The program fails if `auto` of this tree needs more tokens than
another method, or if it needs more than three times as long as greedy-online on a large star.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from before_after import Versions, arguments, program

METHODS = ("auto", "greedy-online", "contiguous")
LARGE_LEAVES = 100_000
STARS = ("star, short prompt", "star, long prompt", "one-token branches")


def plan(leaves: int, effort: str) -> None:
    """Plan all problems by all methods with the treepack that is imported; print a JSON object."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import families as made
    from made_tries import forest_of_trees, trie_of

    from treepack.pack.plan.check import check_plan
    from treepack.pack.plan.planning import plan_rows
    from treepack.pack.plan.problem import SearchOptions

    results: dict[str, dict[str, list[float]]] = {}
    problems = [(family, leaves) for family in made.families()]
    problems += [(family, LARGE_LEAVES) for family in made.families() if family.name in STARS]
    for family, size in problems:
        tree = made.make_tree(family, size)
        trie = trie_of(forest_of_trees([tree]), shuffle=0)
        capacity = family.capacity or max(32768, int(1.3 * tree.length.max()))
        result = results.setdefault(f"{family.name}, {size:,}", {})
        for method in METHODS:
            seconds = []
            for _ in range(2):  # the second run has all code loaded, and compiled before
                start = time.process_time()
                rows = plan_rows(trie, capacity=capacity, method=method, search=SearchOptions(effort))
                seconds.append(time.process_time() - start)
            result[method] = [check_plan(trie, rows).tokens_packed, rows.lower_bound, seconds[-1]]
    print(json.dumps(results))


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--leaves", type=int, default=1000)
    parser.add_argument("--effort", default="low")
    parser.add_argument("--plan", action="store_true", help="plan only, with the treepack on the path")
    options = parser.parse_args()
    if options.plan:
        plan(options.leaves, options.effort)
        return
    with Versions(options.before, options.folder, options.repeats) as versions:
        command = program(Path(__file__).resolve(), "--plan", "--leaves", options.leaves, "--effort", options.effort)
        before, after = (
            json.loads(versions.measure(side, command, versions.folder).output) for side in ("before", "after")
        )
    print("\n| tree | greedy-online, over % | contiguous | auto before | auto after", end=" ")
    print("| auto / greedy before | after | auto s before | after |")
    print("|---|---|---|---|---|---|---|---|---|")
    failures = []
    for name, new in after.items():
        old = before[name]
        bound = max(one[1] for one in [*new.values(), *old.values()])
        over = [
            100 * (one[0] / bound - 1) for one in (new["greedy-online"], new["contiguous"], old["auto"], new["auto"])
        ]
        ratios = [methods["auto"][2] / methods["greedy-online"][2] for methods in (old, new)]
        cells = [*(f"{x:.3f}" for x in over), *(f"{x:.2f}" for x in (*ratios, old["auto"][2], new["auto"][2]))]
        print(f"| {name} | {' | '.join(cells)} |")
        if new["auto"][0] > min(one[0] for one in new.values()):
            failures.append(f"{name}: auto needs more tokens than another method")
        if f"{LARGE_LEAVES:,}" in name and ratios[1] > 3:
            failures.append(f"{name}: auto takes {ratios[1]:.1f} times as long as greedy-online")
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
