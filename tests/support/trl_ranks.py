"""The program of each process of a test of TRL with several ranks: train without and with treepack, save both records.

Arguments: the folder of a model, and the folder for rank0.pt, rank1.pt, ...
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from support.trl_runs import train_both

if __name__ == "__main__":
    torch.set_num_threads(1)
    model, folder = sys.argv[1], Path(sys.argv[2])
    torch.save(train_both(model, folder), folder / f"rank{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()
