"""verl's own losses give the same training on treepack's engine as on verl's, with fewer tokens; over two processes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT
from treepack import TreepackError

pytestmark = pytest.mark.integrations

CASES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
    "FSDP",
    "LoRA",
    "ratio of sequences",
    "cispo",
    "rollout correction",
    "one temperature",
    "fixed micro-batches",
    "more micro-batches on one rank",
    "sequence parallel",
    "sequence parallel and FSDP",
    "sequence parallel and LoRA",
)


@pytest.fixture(scope="module")
def engines() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_PLATFORM", "cpu")
        from support import verl_engines  # the import of verl takes seconds, for which other tests would wait

        yield verl_engines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verl")


@pytest.fixture(scope="module")
def records(engines: Any, folder: Path) -> Any:
    """Return, of each case and rank, the records of verl's engine and of treepack's."""
    records = engines.run_engines(folder)
    assert set(records["cases"]) == set(CASES)
    return records


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_equal_those_of_verl(case: str, records: Any) -> None:
    for flat, tree in records["cases"][case]:
        assert tree["steps"]
        for number, (expected, found) in enumerate(zip(flat["steps"], tree["steps"], strict=True)):
            # Rounding of the first steps changes the weights of the later ones.
            loss, gradient = (1e-6, 1e-5) if number == 0 else (1e-5, 1e-3)
            assert found["loss"] == pytest.approx(expected["loss"], abs=loss * max(1, abs(expected["loss"])))
            assert set(found["gradients"]) == set(expected["gradients"])
            for name, right in expected["gradients"].items():
                assert right.norm() > 0
                assert (found["gradients"][name] - right).norm() <= gradient * right.norm(), name


@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_and_entropies_without_training_equal_those_of_verl(case: str, records: Any) -> None:
    for flat, tree in records["cases"][case]:
        for name in ("log_probs", "entropy"):
            assert flat[name].abs().max() > 1
            assert (tree[name] - flat[name]).abs().max() < 2e-5


def test_every_shared_prefix_is_computed_once(engines: Any, records: Any) -> None:
    from treepack.online import plan_batch

    # Not the first case of its engine, whose first batch runs once more, to check the model.
    for rank, (flat, tree) in enumerate(records["cases"]["seq-mean-token-sum"]):
        data = engines.make_rollouts(rank, engines.CASES["seq-mean-token-sum"].siblings, {})
        minimum = plan_batch(list(data["input_ids"].unbind())).tokens_tree
        assert minimum <= tree["tokens"] <= 1.05 * minimum
        assert flat["tokens"] == len(data["input_ids"].values())
        assert tree["tokens"] <= flat["tokens"] / 3


def test_ranks_of_a_sequence_group_compute_a_part_of_the_tokens_each(records: Any) -> None:
    for flat, tree in records["cases"]["sequence parallel"]:
        assert tree["tokens"] <= flat["tokens"] / 6  # half of a third


def test_all_ranks_run_as_many_micro_batches_as_the_rank_with_the_most(records: Any) -> None:
    counts = {tree["steps"][0]["micro_batches"] for _, tree in records["cases"]["more micro-batches on one rank"]}
    assert len(counts) == 1
    assert counts.pop() > 1


@pytest.mark.parametrize(
    "option",
    ["distillation_use_topk", "distillation_only", "calculate_sum_pi_squared", "use_fused_kernels", "force_group_size"],
)
def test_an_option_of_a_batch_that_is_not_computed_is_refused_by_name(option: str, records: Any) -> None:
    assert f"verl: {option} " in records["refusals"][option]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        (
            {"engine": {"ulysses_sequence_parallel_size": 3}},
            "verl: 3 ranks cannot share the 4 heads of a layer; give ulysses_sequence_parallel_size a divisor of 4",
        ),
        ({"engine": {"pad_to_length": True}}, "fsdp_config.pad_to_length"),
        ({"engine": {"router_replay": {"mode": "R2"}}}, "R2 records the trainer's own experts"),
        ({"model": {"use_fused_kernels": True}}, "model.use_fused_kernels"),
        ({"model": {"enable_activation_offload": True}}, "model.enable_activation_offload"),
    ],
)
def test_an_option_of_the_engine_that_is_not_computed_is_refused_by_name(
    changes: dict[str, Any], name: str, engines: Any, records: Any, folder: Path
) -> None:
    with pytest.raises(TreepackError, match=name):
        engines.tree_engine_class("language_model")(**engines.engine_configs(folder / "model", **changes))


def test_the_documented_options_compose_with_those_of_verl(engines: Any) -> None:
    import verl
    from hydra import compose, initialize_config_dir
    from verl.utils.config import omega_conf_to_dataclass

    page = (ROOT / "docs" / "your-trainer.md").read_text()
    section = page[page.index("\n## verl\n") : page.index("\n## Sampling trees in verl")]
    options = re.findall(r"\+?actor_rollout_ref\.[\w.]+=[\w.]+", section)
    given = [option.replace("size=R", "size=2") for option in options]
    assert len(given) >= 8
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", given)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.engine.strategy == "treepack"
    assert actor.engine.ulysses_sequence_parallel_size == 2
    engine_class = engines.tree_engine_class("language_model")
    assert vars(sys.modules[engine_class.__module__])["_replay_mode"](actor.engine) == "R3"


def test_recorded_experts_are_replayed_as_in_each_sequence_alone(records: Any) -> None:
    for found in records["replay"]:
        assert (found["R3"] - found["alone"]).abs().max() < 2e-4
        assert (found["disabled"] - found["alone"]).abs().max() > 1e-2
        assert "enable_rollout_routing_replay=True" in found["refusal"]


def test_a_critic_is_refused(engines: Any, records: Any, folder: Path) -> None:
    with pytest.raises(TreepackError, match=r"critic\.strategy=fsdp2"):
        engines.tree_engine_class("value_model")(**engines.engine_configs(folder / "model"))
