"""Rollouts of a trie, each of which has one trajectory or several.

    Trie --rollouts_of--> TrieRollouts      the rollout of each trajectory; a rollout counts once in its group
    Trie --by_agent--> Trie                 the parts of each rollout that one agent made, as rollouts of their own

A conversation becomes several trajectories if the chat template rewrites its earlier turns, if each turn is a sample,
or if a program rewrites the history between two calls of the model.

    trajectory   a/part-0  a/part-1  b      reward  1 1 0     rollouts a and b: mean 1/2, advantages 1/2 1/2 -1/2
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from treepack.errors import TreepackError
from treepack.files.metadata import parse_metadata
from treepack.rl.group_tree import group_codes
from treepack.rl.rollout_parts import first_of_each, rollout_codes, rollout_parts
from treepack.trajectory import ON_SEVERAL_PATHS, Float64, Int64
from treepack.trie.trie import Trie


@dataclass(frozen=True, slots=True)
class TrieRollouts:
    """The rollouts of the trajectories of a trie.

    Attributes:
        of_trajectory: int64 [num_trajectories], the number of each one's rollout, from 0.
        first: int64 [num_rollouts], the first trajectory of each rollout in the order of the trie, ascending.
        part: int64 [num_trajectories], ascending over the trajectories of a rollout.
    """

    of_trajectory: Int64
    first: Int64
    part: Int64

    @property
    def are_split(self) -> bool:
        """True if a rollout has several trajectories."""
        return len(self.first) < len(self.of_trajectory)


def rollouts_of(trie: Trie) -> TrieRollouts:
    """Return the rollouts of `trie`.

    Raises:
        TreepackError: a trajectory belongs to several rollouts, or trajectories of one differ in reward, group or step.
    """
    count, table = trie.num_trajectories, trie.trajectories
    codes = rollout_codes(table)
    if codes is None:
        every = np.arange(count)
        return TrieRollouts(every, every, np.zeros(count, np.int64))
    part = rollout_parts(table)
    shared = np.flatnonzero(part == ON_SEVERAL_PATHS)
    if len(shared):
        raise TreepackError(
            f"{trie.source(shared[0])}: has turns that several paths of a search tree share, {len(shared):,} such "
            "trajectories in total, and groups compare rollouts; build the trie without --expand turns, or with "
            "--per-path"
        )
    # codes [4, 2, 4] -> first of each [0, 1, 0] -> first [0, 1], number [0, 1, 0]
    first, number = np.unique(first_of_each(codes), return_inverse=True)
    rollouts = TrieRollouts(number.astype(np.int64), first.astype(np.int64), part)
    own = rollouts.first[rollouts.of_trajectory]
    reward: Float64 = table["reward"].to_numpy().astype(np.float64)
    group = group_codes(trie)
    same_reward = (reward == reward[own]) | (np.isnan(reward) & np.isnan(reward[own]))
    for fact, same in (("reward", same_reward), ("group_id or step", group == group[own])):
        if not same.all():
            i = int((~same).argmax())
            names = [table["trajectory_id"][int(k)].as_py() for k in (own[i], i)]
            raise TreepackError(
                f"{trie.source(i)}: {names[0]} and {names[1]} belong to one rollout, but their {fact} differs; give "
                "all trajectories of a rollout the same"
            )
    return rollouts


def by_agent(trie: Trie) -> Trie:
    """Return `trie` with a rollout and a group for each agent of a rollout; the tokens are the same.

    The name of an agent is the field `agent` of the metadata. Trajectories without it are the parts of one agent. A
    trajectory without a reward gets the first one of its rollout. The slow form, for a trajectory with rollout r, group
    g and agent a: rollout (r, a), group (g, a).

    Raises:
        TreepackError: no trajectory has the name of an agent.
    """
    table = trie.trajectories
    agents = [""] * trie.num_trajectories
    for i in np.flatnonzero(pc.match_substring(table["metadata"], '"agent"').to_numpy()).tolist():
        agents[i] = str(parse_metadata(table["metadata"][i].as_py(), trie.source(i)).get("agent") or "")
    if not any(agents):
        raise TreepackError(
            "no trajectory has the name of an agent in its metadata; give the records a field agent, or leave out --by "
            "agent"
        )
    reward = table["reward"].to_numpy().astype(np.float64)
    codes = rollout_codes(table)
    if codes is not None:
        # Rewards [nan, 1, nan] of the rollouts [0, 0, 1] -> [1, 1, nan]
        known = np.full(int(codes.max(initial=-1)) + 1, np.nan)
        has_reward = np.flatnonzero(~np.isnan(reward))[::-1]
        known[codes[has_reward]] = reward[has_reward]
        reward = np.where(np.isnan(reward), known[codes], reward)
    columns: dict[str, pa.Array] = {"reward": pa.array(reward, mask=np.isnan(reward))}
    for name in ("rollout_id", "group_id"):
        values = zip(table[name].to_pylist(), agents, strict=True)
        columns[name] = pa.array([None if value is None else f"{value}\n{agent}" for value, agent in values])
    for name, column in columns.items():
        place = table.column_names.index(name)
        table = table.set_column(place, table.schema.field(name), column.cast(table.schema.field(name).type))
    return replace(trie, trajectories=table)


def refuse_split(trie: Trie, *, what: str, remedy: str, members: Int64 | None = None) -> None:
    """Check that no rollout of the trajectories `members` (all by default) has several trajectories.

    Raises:
        TreepackError: one has; the message contains `what` and the `remedy`.
    """
    rollouts = rollouts_of(trie)
    if not rollouts.are_split:
        return
    sizes = np.bincount(rollouts.of_trajectory)
    mine = rollouts.of_trajectory if members is None else rollouts.of_trajectory[members]
    split = np.unique(mine[sizes[mine] > 1])
    if len(split):
        i = int(rollouts.first[split[0]])
        raise TreepackError(
            f"{trie.source(i)}: the rollout {trie.trajectories['rollout_id'][i].as_py()} is "
            f"{sizes[split[0]]:,} trajectories, because its prompts do not continue each other ({len(split):,} such "
            f"rollouts in total), and {what} one trajectory per rollout; {remedy}"
        )
