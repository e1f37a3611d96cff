"""Types of the names that `treepack` loads when they are first used; a test compares them with `_HOME`."""

from treepack.analysis.check import check as check
from treepack.analysis.options import ReportOptions as ReportOptions
from treepack.analysis.options import StatsOptions as StatsOptions
from treepack.analysis.stats import stats as stats
from treepack.attention import allow_generation as allow_generation
from treepack.attention import register as register_attention
from treepack.data.batch import make_batch as make_batch
from treepack.data.dataset import PackedDataset as PackedDataset
from treepack.errors import TreepackError as TreepackError
from treepack.ingest.array_rollouts import trajectories_from_arrays as trajectories_from_arrays
from treepack.ingest.options import BuildOptions as BuildOptions
from treepack.model.adapters.lora_options import LoraOptions as LoraOptions
from treepack.model.forward import row_loss as row_loss
from treepack.model.load import load_model as load_model
from treepack.online.batch import OnlineBatch as OnlineBatch
from treepack.online.batch import plan_batch as plan_batch
from treepack.online.options import OnlineOptions as OnlineOptions
from treepack.online.statistics import batch_statistics as batch_statistics
from treepack.online.statistics import tree_logprobs_like as tree_logprobs_like
from treepack.pack.directory import pack_trie as pack_trie
from treepack.pack.options import PackOptions as PackOptions
from treepack.pack.packing import plan_packing as plan_packing
from treepack.processes import Progress as Progress
from treepack.report.write import write_report as write_report
from treepack.rl.advantages.advantage_options import AdvantageOptions as AdvantageOptions
from treepack.rl.advantages.directory import write_advantages as write_advantages
from treepack.rollout.options import RolloutOptions as RolloutOptions
from treepack.rollout.options import TreeOptions as TreeOptions
from treepack.rollout.run import sample_rollouts as sample_rollouts
from treepack.trajectory import Trajectory as Trajectory
from treepack.trie.builders.in_memory import build_trie as build_trie
from treepack.trie.directory import build_trie_directory as build_trie_directory
from treepack.trie.directory import read_to_trie as read_to_trie
from treepack.trie.trie import Trie as Trie

__version__: str
_HOME: dict[str, str]

__all__ = [
    "AdvantageOptions",
    "BuildOptions",
    "LoraOptions",
    "PackOptions",
    "PackedDataset",
    "Progress",
    "ReportOptions",
    "RolloutOptions",
    "StatsOptions",
    "Trajectory",
    "TreeOptions",
    "TreepackError",
    "Trie",
    "__version__",
    "allow_generation",
    "build_trie",
    "build_trie_directory",
    "check",
    "load_model",
    "make_batch",
    "pack_trie",
    "plan_packing",
    "read_to_trie",
    "register_attention",
    "row_loss",
    "sample_rollouts",
    "stats",
    "trajectories_from_arrays",
    "write_advantages",
    "write_report",
]
