"""Add advantages to a trie directory: `treepack advantages` as a function.

    trie/ --read_trie--> Trie --estimate_advantages, with_advantages--> Trie --write_trie--> out/

The directory appears when it is complete.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from treepack.files import schema
from treepack.files.directory import finished_directory, refuse_existing
from treepack.files.input_files.inputs import displayed
from treepack.files.lock import lock
from treepack.files.manifest import Manifest, Provenance, read_manifest, trie_entry
from treepack.files.prepared import TRIE, prepared_part
from treepack.files.remote.address import AnyPath, as_output, as_path
from treepack.files.remote.cache import local_copy, naming_addresses
from treepack.rl.advantages.advantage_options import AdvantageOptions
from treepack.rl.advantages.estimate import AdvantageEstimates, estimate_advantages, with_advantages
from treepack.trie.store.trie_files import read_trie, write_trie
from treepack.trie.totals import trie_totals


@dataclass(frozen=True, slots=True)
class AdvantagesSummary:
    """A trie directory with advantages that was written.

    Attributes:
        path: the directory.
        manifest: its manifest.
        estimates: the advantages, and the groups that were rejected.
        num_trajectories: trajectories of the trie that was read.
        replaced: True if that trie had advantages already.
    """

    path: AnyPath
    manifest: Manifest
    estimates: AdvantageEstimates
    num_trajectories: int
    replaced: bool


@naming_addresses()
def write_advantages(
    trie: str | AnyPath, out: str | AnyPath, options: AdvantageOptions, *, overwrite: bool = False
) -> AdvantagesSummary:
    """Compute advantages from the rewards of a trie directory, and write them with the trie to the directory `out`.

    Args:
        trie: a trie directory, an output of `treepack prepare`, or the address of a trie.
        out: the directory to write, or an address; it appears when it is complete.
        options: the estimator and its variants.
        overwrite: replace `out` if treepack wrote it.

    Raises:
        TreepackError: no group is left, rewards or segments that do not suit, or `out` cannot be written.
    """
    trie, out = prepared_part(as_path(trie), TRIE), as_output(out)
    refuse_existing(out, overwrite=overwrite, inputs=[trie])
    with lock(out):
        trie = local_copy(trie)
        manifest = read_manifest(trie, schema.TRIE_FORMAT)
        read = read_trie(trie, token_values=True)
        columns = [read.trajectories[name] for name in ("advantage", "advantages")]
        replaced = any(column.null_count < read.num_trajectories for column in columns)
        estimates = estimate_advantages(read, options)
        written = with_advantages(read, estimates, rejected=options.rejected)
        provenance = replace(
            Provenance.of(manifest),
            trie=trie_entry(trie, displayed(str(trie))),
            advantages=_recorded(options),
            totals=trie_totals(written),
        )
        with finished_directory(out, overwrite=overwrite) as temporary:
            new = write_trie(written, temporary, provenance)
    return AdvantagesSummary(out, new, estimates, read.num_trajectories, replaced)


def _recorded(options: AdvantageOptions) -> dict[str, Any]:
    """Return the options as the manifest records them; leaf weights, edges and options of gae only if they are used."""
    unused = {name for name in ("leaf_weights", "fallback_leaves", "edges") if not getattr(options, name)}
    unused |= set() if options.kl_in_reward else {"kl_in_reward", "kl_estimator"}
    unused |= set() if options.overlong else {"overlong"}
    unused |= {"by"} if options.by == "rollout" else set()
    if options.estimator != "gae":
        unused |= {"values", "gamma", "lam", "whiten", "truncated"}
    return {name: value for name, value in asdict(options).items() if name not in unused}
