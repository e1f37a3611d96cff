"""The four arms of TRACE's table 1 (arXiv 2606.11119): each of the two stages uniform or active, all else equal.

    State --trace_arm(...)--> (decoded tokens, figures)        arms of curves.py; trace_tables.py makes the table

    python benchmarks/reproduction/curves.py --policy MAZE --out FOLDER --tokens 1e6
        --arms trace-uniform trace-roots trace-prefixes trace
    python benchmarks/reproduction/trace_tables.py FOLDER

A step of curves.py has `prompts` times `width` rollouts. Here it has M rollouts of prompts and M N continuations, which
count as half a rollout each, with N = 2 and M (1 + N / 2) equal to that number. As in the paper's setting, uniform
roots are half of the candidates with four rollouts each. Tokens are charged as they were decoded.

Expected minutes on one H200, for counts and not measured: a step has 256 rollouts and 512 continuations, and a run of
1e6 tokens of the maze about 150 steps. Beside the runs of curves.py it also computes the predictor: three passes over
the prefixes of a step. Four arms of five seeds in two batches of ten processes: 10 to 15 minutes.
"""

from __future__ import annotations

from pathlib import Path

from curves_arms import Arm, State
from trace_predictor import start_predictor
from trace_rounds import Actors, Budget, play_round

EXPAND = 2  # N
UNIFORM_ROLLOUTS = 4  # of a prompt that uniform allocation selects


def budget_of(state: State) -> Budget:
    """Return the budget that counts as many rollouts as a step of the other arms."""
    # 32 prompts of 16 rollouts: 512 = M (1 + 2 / 2), M = 256, and 64 of 128 candidates with 4 rollouts each.
    rollouts = int(state.sizes.prompts * state.sizes.width / (1 + EXPAND / 2))
    return Budget(max(2, 2 * rollouts // UNIFORM_ROLLOUTS), rollouts, EXPAND)


def trace_arm(*, active_roots: bool, active_prefixes: bool) -> Arm:
    """Return an arm. Its first step is uniform, because the predictor has seen nothing."""

    def step(state: State) -> tuple[int, dict[str, float]]:
        learner = state.learner
        if "actors" not in state.memory:
            predictor = start_predictor(
                Path(learner.policy.source),
                device=learner.policy.device.type,
                segment=learner.segment,
                seed=state.seed,
            )
            state.memory["actors"] = Actors(learner, predictor)
        budget = budget_of(state)
        figures = play_round(
            state.memory["actors"],
            state.queries(budget.candidates),
            budget,
            active=(active_roots, active_prefixes) if state.step > 1 else (False, False),
            seed=state.step_seed("rollouts"),
            version=state.step,
        )
        return figures["step_decoded"], figures

    return step


ARMS: dict[str, Arm] = {
    "trace-uniform": trace_arm(active_roots=False, active_prefixes=False),
    "trace-roots": trace_arm(active_roots=True, active_prefixes=False),
    "trace-prefixes": trace_arm(active_roots=False, active_prefixes=True),
    "trace": trace_arm(active_roots=True, active_prefixes=True),
}
