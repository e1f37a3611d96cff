"""The program of each process of a test of TRL with several ranks: train without and with treepack, save the records.

Arguments: the folder of a model, and the folder for rank0.pt, rank1.pt, ...
"""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from trl import GRPOTrainer

from support.trl_runs import train, tree_trainer
from treepack.online import OnlineOptions

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
    torch.save(records, folder / f"rank{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()
