"""TRL's SFTTrainer on a packed directory: rows instead of samples, and treepack's loss.

    PackedDataset  --index--> datasets.Dataset of row numbers  --SFTTrainer's sampler-->  collate  -->  batch_loss

The loss of an optimiser step is the sum of loss_weight * nll over its rows, divided by the sum of loss_weight, over all
micro-batches and ranks; see docs/your-trainer.md.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor

from treepack.data.dataset import PackedDataset
from treepack.errors import TreepackError
from treepack.integrations.tree_model import use_tree_attention
from treepack.integrations.trl_checks import check_trainer, trainer_dtype
from treepack.integrations.versions import check_program
from treepack.model.collation import batch_loss, collate

Trainer = TypeVar("Trainer")


def packed_trainer(base: type[Trainer]) -> type[Trainer]:
    """Return a subclass of TRL's SFTTrainer whose `train_dataset` is a `PackedDataset`.

    The subclass takes the other arguments of `base`, and sets the two options that a dataset of rows needs:
    remove_unused_columns=False and dataset_kwargs={"skip_prepare_dataset": True}. TRL's metrics of tokens are not
    logged.

    Raises:
        TreepackError: by the subclass, if `train_dataset` is not a `PackedDataset`, or an option changes the loss.
    """
    check_program("trl", base, ("get_batch_samples", "compute_loss(num_items_in_batch)"), user="tree_trainer")

    class PackedTrainer(base):  # type: ignore[valid-type,misc]
        loss_is_scaled_for_ga = True  # compute_loss divides by the weight of the whole step

        def __init__(
            self, model: Any, args: Any, *, train_dataset: PackedDataset, eval_dataset: None = None, **more: Any
        ) -> None:
            from datasets import Dataset

            if not isinstance(train_dataset, PackedDataset) or eval_dataset is not None:
                raise TreepackError(
                    f"{type(self).__name__}: expected train_dataset=PackedDataset(...) and no eval_dataset; "
                    "measure the held-out loss with `treepack train --eval`"
                )
            _check_loss(args, type(self).__name__)
            chosen = copy.copy(args)
            chosen.remove_unused_columns = False
            chosen.dataset_kwargs = {**(args.dataset_kwargs or {}), "skip_prepare_dataset": True}
            super().__init__(
                model,
                chosen,
                train_dataset=Dataset.from_dict({"row": range(len(train_dataset))}),
                data_collator=lambda rows: collate([train_dataset[each["row"]] for each in rows]),
                **more,
            )
            check_trainer(self)
            use_tree_attention(self.model, self.args.device, trainer_dtype(self.args))

        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Tensor]:
            batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
            weight = sum((batch["loss_weight"].sum() for batch in batches), torch.zeros((), dtype=torch.float64))
            return batches, self.accelerator.gather(weight.to(device)).sum()

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Tensor | None = None
        ) -> Tensor:
            if num_items_in_batch is None:
                raise TreepackError(
                    f"{type(self).__name__}: evaluation has no denominator; use `treepack train --eval`"
                )
            # Ranks average their gradients, so the sum over ranks is their number times the average.
            processes: int = self.accelerator.num_processes
            return batch_loss(model, inputs) / num_items_in_batch * processes

    PackedTrainer.__name__ = PackedTrainer.__qualname__ = f"Packed{base.__name__}"
    return PackedTrainer


def _check_loss(args: Any, name: str) -> None:
    """Refuse options of TRL that ask for another loss.

    Raises:
        TreepackError: naming the option.
    """
    if args.loss_type != "nll":
        raise TreepackError(f"{name}: loss_type is {args.loss_type!r}; rows are trained with 'nll'")
    if args.label_smoothing_factor:
        raise TreepackError(f"{name}: label_smoothing_factor is {args.label_smoothing_factor:g}; expected 0")
