"""`treepack critic`: write a critic's value after every token of a trie into a copy of the trie."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from treepack.train.scoring_options import CriticOptions

from .config import common_options
from .devices import check_device
from .option_groups import field_options, option_group
from .output import quoted, reserve_directory, show, show_end
from .paths import TRIE, WRITE
from .progress import progress_bars
from .sections import SectionedCommand
from .stages import import_torch, stage_lines

if TYPE_CHECKING:
    from treepack.files.remote.address import AnyPath


_critic_options = option_group(
    "options",
    field_options(CriticOptions, carry={"default": "off", "show_default": True}),
    CriticOptions,
)


@click.command(cls=SectionedCommand)
@click.argument("trie", type=TRIE)
@click.option(
    "--model",
    required=True,
    metavar="DIR|NAME",
    help="Critic: an output of treepack train --loss value or --value-coef, also one with --lora-rank.",
)
@click.option("--out", type=WRITE, required=True, help="Trie directory to write.")
@_critic_options
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@common_options
def critic(trie: AnyPath, model: str, out: AnyPath, options: CriticOptions, overwrite: bool) -> None:
    """Write the value after every token of a trie into a copy of the trie, as the column token_values of its nodes.

    The value is the expected rest of the return in the state after the token. Every tree token gets one value.
    treepack advantages --estimator gae computes advantages and returns from them.
    """
    import numpy as np

    from treepack.errors import TreepackError
    from treepack.files.model_source import VALUE_FILE
    from treepack.model.accept.vocabulary import ADAPTER_FILE, NO_CRITIC
    from treepack.train.early_checks import check_trie_model
    from treepack.train.input_checks import refuse_ranks

    refuse_ranks("treepack critic")
    reserve_directory(out, [trie, model], overwrite=overwrite)
    check_device(options.device, options.attention)
    check_trie_model(trie, model)
    if Path(model).exists() and not any((Path(model) / name).exists() for name in (VALUE_FILE, ADAPTER_FILE)):
        raise TreepackError(f"{model}: {NO_CRITIC}")
    import_torch()
    from treepack.train.critic import write_values

    with stage_lines(), progress_bars() as progress:
        summary = write_values(trie, model, out, options, overwrite=overwrite, progress=progress)
    notes = (*summary.notes, *([f"the values of {trie} are replaced"] if summary.replaced else []))
    for note in notes:
        click.echo(f"note: {note}", err=True)
    low, middle, high = np.quantile(summary.values, [0, 0.5, 1]).tolist()
    show(
        {
            "tree tokens": len(summary.values),
            "rows": summary.num_rows,
            "tokens computed": summary.num_computed,
            "tokens if each trajectory is computed alone": summary.tokens_flat,
            "attention": summary.attention,
            "mean value": float(summary.values.mean()),
            "smallest": low,
            "median": middle,
            "largest": high,
            "written": "token_values",
        }
    )
    show_end(out, then=f"treepack advantages {quoted(out)} --estimator gae --out ADVANTAGES")
