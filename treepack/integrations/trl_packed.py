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

from treepack.data.batch import empty_batch
from treepack.data.dataset import PackedDataset
from treepack.errors import TreepackError
from treepack.integrations.tree_model import use_tree_attention
from treepack.integrations.trl_checks import check_parallelism, check_trainer, trainer_dtype
from treepack.integrations.versions import check_program
from treepack.model.collation import batch_loss_and_metrics, collate

_Trainer = TypeVar("_Trainer")


_ROW_COLUMNS = ["source", "row"]  # of the dataset that TRL gets
_FIELDS = ("_metrics", "_total_train_tokens", "accelerator", "model", "args")


def packed_trainer(base: type[_Trainer]) -> type[_Trainer]:
    """Return a subclass of TRL's SFTTrainer whose `train_dataset` is a `PackedDataset`.

    The subclass takes the other arguments of `base`; `eval_dataset` is a `PackedDataset` too, or a dict of them. It
    sets the two options that a dataset of rows needs: remove_unused_columns=False and
    dataset_kwargs={"skip_prepare_dataset": True}. It logs TRL's entropy, mean_token_accuracy and num_tokens, the tokens
    of all rollouts, and tree/flat_over_computed_tokens. Entropies and accuracies count a token as often as the loss.

    Raises:
        TreepackError: by the subclass, if a dataset is not a `PackedDataset`, or an option changes the loss.
    """
    names = ("get_batch_samples", "compute_loss(num_items_in_batch)", "evaluation_loop(metric_key_prefix)", "evaluate")
    check_program("trl", base, names, user="tree_trainer")

    class PackedTrainer(base):  # type: ignore[valid-type,misc]
        loss_is_scaled_for_ga = True  # compute_loss divides by the weight of the whole step

        def __init__(self, model: Any, args: Any, *, train_dataset: Any, eval_dataset: Any = None, **more: Any) -> None:
            name = type(self).__name__
            _check_loss(args, name)
            check_parallelism(name, args)
            if more.get("compute_metrics") is not None:
                raise TreepackError(f"{name}: compute_metrics gets the logits of samples, which rows do not have")
            chosen = copy.copy(args)
            chosen.remove_unused_columns = False
            chosen.dataset_kwargs = {**(args.dataset_kwargs or {}), "skip_prepare_dataset": True}
            self._packed = _PackedSources(name)
            self._held_out = torch.zeros(2, dtype=torch.float64)  # loss and weight of the rows evaluated so far
            super().__init__(
                model,
                chosen,
                train_dataset=self._packed.rows(train_dataset, "train_dataset"),
                eval_dataset=self._packed.held_out(eval_dataset, args),
                data_collator=self._packed.collate,
                **more,
            )
            check_program("trl", self, _FIELDS, user=name)
            check_trainer(self)
            use_tree_attention(self.model, self.args.device, trainer_dtype(self.args))

        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Tensor]:
            batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
            weight = sum((batch["loss_weight"].sum() for batch in batches), torch.zeros((), dtype=torch.float64))
            return batches, self.accelerator.gather(weight.to(device)).sum()

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Tensor | None = None
        ) -> Tensor:
            loss, sums = batch_loss_and_metrics(model, inputs)
            weight = inputs["loss_weight"].sum()
            _note_metrics(self, sums, weight, inputs)
            if num_items_in_batch is None:  # an evaluation
                self._held_out += torch.stack([loss.detach(), weight.to(loss.device)]).cpu()
                num_items_in_batch = weight.clamp(min=1e-30).to(loss.device)
                return loss / num_items_in_batch
            # Ranks average their gradients, so the sum over ranks is their number times the average.
            processes: int = self.accelerator.num_processes
            return loss / num_items_in_batch * processes

        def evaluate(self, eval_dataset: Any = None, *arguments: Any, **options: Any) -> dict[str, float]:
            metrics: dict[str, float] = super().evaluate(
                self._packed.held_out(eval_dataset, self.args), *arguments, **options
            )
            return metrics

        def evaluation_loop(self, *arguments: Any, metric_key_prefix: str = "eval", **options: Any) -> Any:
            self._held_out.zero_()
            output = super().evaluation_loop(*arguments, metric_key_prefix=metric_key_prefix, **options)
            # TRL's mean over micro-batches would weigh a row by its neighbours.
            local = self._held_out.to(self.args.device)
            loss, weight = self.accelerator.gather(local[None]).sum(0).tolist()
            output.metrics[f"{metric_key_prefix}_loss"] = loss / weight if weight else 0.0
            return output

    PackedTrainer.__name__ = PackedTrainer.__qualname__ = f"Packed{base.__name__}"
    return PackedTrainer


def _note_metrics(trainer: Any, sums: Tensor, weight: Tensor, inputs: Any) -> None:
    """Add TRL's metrics of a micro-batch to those of the trainer, summed over all ranks."""
    flat = inputs["scale"].sum(dtype=torch.float64)
    computed = (inputs["scale"] > 0).sum(dtype=torch.float64)
    local = torch.stack([*sums, *(each.to(sums.device) for each in (weight, flat, computed))])
    entropy, correct, total, tokens, num_computed = trainer.accelerator.gather(local[None]).sum(0).tolist()
    mode = "train" if trainer.model.training else "eval"
    metrics = trainer._metrics[mode]
    metrics["entropy"].append(entropy / total if total else 0.0)
    metrics["mean_token_accuracy"].append(correct / total if total else 0.0)
    metrics["tree/flat_over_computed_tokens"].append(tokens / max(num_computed, 1))
    if mode == "train":
        trainer._total_train_tokens += int(tokens)
    metrics["num_tokens"] = [trainer._total_train_tokens]


class _PackedSources:
    """The packed directories of a trainer, which sees numbers of rows: {"source": 0, "row": 5}."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.datasets: list[PackedDataset] = []

    def rows(self, dataset: Any, argument: str, *, multiple: int = 1) -> Any:
        """Return the rows of `dataset` for TRL; -1 is a row of padding, up to a `multiple` of rows.

        Raises:
            TreepackError: it is not a `PackedDataset`.
        """
        from datasets import Dataset

        if not isinstance(dataset, PackedDataset):
            raise TreepackError(
                f"{self.name}: expected {argument}=PackedDataset(...), not {type(dataset).__name__}; pack samples with "
                "`treepack prepare`"
            )
        if not any(each is dataset for each in self.datasets):
            self.datasets.append(dataset)
        source = next(i for i, each in enumerate(self.datasets) if each is dataset)
        numbers = [*range(len(dataset)), *[-1] * (-len(dataset) % multiple)]
        return Dataset.from_dict(dict(zip(_ROW_COLUMNS, ([source] * len(numbers), numbers), strict=True)))

    def held_out(self, given: Any, args: Any) -> Any:
        """Return the rows of an `eval_dataset`: None, a `PackedDataset`, a dict of them, or a name that TRL knows.

        All ranks get whole batches, because a sampler would repeat rows to fill the last one.
        """
        if given is None or isinstance(given, str):
            return given
        if isinstance(given, dict):
            return {name: self.held_out(each, args) for name, each in given.items()}
        if getattr(given, "column_names", None) == _ROW_COLUMNS:  # what this method has returned before
            return given
        return self.rows(given, "eval_dataset", multiple=args.eval_batch_size * args.world_size)

    def collate(self, rows: list[dict[str, int]]) -> dict[str, Any]:
        """Return the batch of some rows."""
        return collate(
            [self.datasets[each["source"]][each["row"]] if each["row"] >= 0 else empty_batch(1) for each in rows]
        )


def _check_loss(args: Any, name: str) -> None:
    """Refuse options of TRL that ask for another loss.

    Raises:
        TreepackError: naming the option.
    """
    for option in ("packing", "eval_packing", "padding_free"):
        if getattr(args, option, None):
            raise TreepackError(f"{name}: {option}=True packs samples, and the rows are packed already; leave it out")
    for option in ("assistant_only_loss", "completion_only_loss"):
        if getattr(args, option, None):
            raise TreepackError(
                f"{name}: {option}=True chooses trained tokens, which `treepack prepare` has chosen; leave it out"
            )
    if args.loss_type != "nll":
        raise TreepackError(f"{name}: loss_type is {args.loss_type!r}; rows are trained with 'nll'")
    if args.label_smoothing_factor:
        raise TreepackError(f"{name}: label_smoothing_factor is {args.label_smoothing_factor:g}; expected 0")
