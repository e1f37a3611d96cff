"""The program of each process of a test of TRL with several ranks: train without and with treepack, save the records.

Arguments: the folder of a model, and the folder for rank0.pt, rank1.pt, ...

accelerate shards on GPUs only, so its state is told here that ranks on CPUs are sharded too.
"""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from trl import GRPOTrainer

from support.trl_runs import train, tree_trainer
from treepack.online import OnlineOptions

FSDP2: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]},
}


def shard_on_cpus() -> None:
    """Let accelerate use FSDP in the trainers that are made from now on."""
    original = AcceleratorState.__init__

    def start(state: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        original(state, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            state.fsdp_plugin = fsdp_plugin

    AcceleratorState._reset_state(True)
    AcceleratorState.__init__ = start


if __name__ == "__main__":
    torch.set_num_threads(1)
    model, folder = sys.argv[1], Path(sys.argv[2])
    shared = tree_trainer(GRPOTrainer, OnlineOptions(capacity=160), sequence_ranks=2)
    changes: dict[str, Any] = {
        "beta": 0.1,
        "entropy_coef": 0.01,
    }  # a reference model, and entropies in the loss
    bases = {"tree": tree_trainer(GRPOTrainer), "shared": shared, "flat": GRPOTrainer}
    records = {name: train(base, model, folder, **changes) for name, base in bases.items()}
    shard_on_cpus()
    records["sharded"] = train(shared, model, folder, **changes, **FSDP2)
    torch.save(records, folder / f"rank{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()
