"""Types of the names that `treepack` loads when they are first used; a test compares them with `_HOME`."""

from treepack.analysis.check import check as check
from treepack.analysis.options import ReportOptions as ReportOptions
from treepack.analysis.options import StatsOptions as StatsOptions
from treepack.analysis.stats import stats as stats
from treepack.attention import Reach as Reach
from treepack.attention import allow_generation as allow_generation
from treepack.attention import first_visible as first_visible
from treepack.attention import register as register_attention
from treepack.attention import tree_attention as tree_attention
from treepack.carry.backward import CarryOptions as CarryOptions
from treepack.carry.backward import backward_row as backward_row
from treepack.carry.backward import row_scores as row_scores
from treepack.carry.backward import row_value as row_value
from treepack.carry.verify import in_pieces as in_pieces
from treepack.cluster.build import build_trie_on as build_trie_on
from treepack.cluster.map_scheduler import MapScheduler as MapScheduler
from treepack.cluster.pack import pack_trie_on as pack_trie_on
from treepack.cluster.ray import RayScheduler as RayScheduler
from treepack.cluster.scheduler import Scheduler as Scheduler
from treepack.data.batch import make_batch as make_batch
from treepack.data.dataset import PackedDataset as PackedDataset
from treepack.errors import TreepackError as TreepackError
from treepack.files.manifest import Provenance as Provenance
from treepack.ingest.options import BuildOptions as BuildOptions
from treepack.ingest.read_log import ReadLog as ReadLog
from treepack.ingest.readers.registry import read_trajectories as read_trajectories
from treepack.ingest.tokenization import tokenize as tokenize
from treepack.model.adapter import LoraOptions as LoraOptions
from treepack.model.collation import batch_logprobs as batch_logprobs
from treepack.model.collation import batch_loss as batch_loss
from treepack.model.collation import collate as collate
from treepack.model.experts.interface import register_experts as register_experts
from treepack.model.forward import row_logprobs as row_logprobs
from treepack.model.forward import row_loss as row_loss
from treepack.model.forward import row_objective as row_objective
from treepack.model.forward import row_values as row_values
from treepack.model.load import load_model as load_model
from treepack.model.loss import tree_logprobs as tree_logprobs
from treepack.model.loss import weighted_nll as weighted_nll
from treepack.model.objective import choose_objective as choose_objective
from treepack.model.objectives import objective_loss as objective_loss
from treepack.model.row_factors import row_factors as row_factors
from treepack.model.verify import verify_gradients as verify_gradients
from treepack.online.batch import OnlineBatch as OnlineBatch
from treepack.online.batch import plan_batch as plan_batch
from treepack.online.options import OnlineOptions as OnlineOptions
from treepack.online.statistics import batch_statistics as batch_statistics
from treepack.online.statistics import row_statistics as row_statistics
from treepack.online.statistics import tree_logprobs_like as tree_logprobs_like
from treepack.pack.directory import PackSummary as PackSummary
from treepack.pack.directory import pack_trie as pack_trie
from treepack.pack.files import read_rows as read_rows
from treepack.pack.files import write_packed as write_packed
from treepack.pack.micro_batches import micro_batches as micro_batches
from treepack.pack.options import PackOptions as PackOptions
from treepack.pack.packing import Packing as Packing
from treepack.pack.packing import plan_packing as plan_packing
from treepack.pack.plan.check import check_plan as check_plan
from treepack.pack.plan.plan import Plan as Plan
from treepack.pack.plan.planning import merge_pieces as merge_pieces
from treepack.pack.plan.planning import plan_pieces as plan_pieces
from treepack.pack.plan.planning import plan_rows as plan_rows
from treepack.pack.row import Row as Row
from treepack.pack.row import concatenate_rows as concatenate_rows
from treepack.pack.rows import pack_rows as pack_rows
from treepack.processes import Progress as Progress
from treepack.report.write import write_report as write_report
from treepack.research.predictor.fit import fit as fit_values
from treepack.research.predictor.fit import open_fit as open_fit
from treepack.research.predictor.model import load_values as load_values
from treepack.research.predictor.model import predict as predict_values
from treepack.research.pros.augmentation import augment as augment
from treepack.research.pros.pass_rates import estimate as estimate_pass_rates
from treepack.rl.advantages.directory import AdvantagesSummary as AdvantagesSummary
from treepack.rl.advantages.directory import write_advantages as write_advantages
from treepack.rl.advantages.estimate import AdvantageOptions as AdvantageOptions
from treepack.rl.advantages.estimate import estimate_advantages as estimate_advantages
from treepack.rl.advantages.estimate import with_advantages as with_advantages
from treepack.rollout.engine import Engine as Engine
from treepack.rollout.engine import Sampling as Sampling
from treepack.rollout.environment import Environment as Environment
from treepack.rollout.episode import SingleTurn as SingleTurn
from treepack.rollout.in_process.local import LocalEngine as LocalEngine
from treepack.rollout.in_process.local import load_engine as load_engine
from treepack.rollout.options import TreeOptions as TreeOptions
from treepack.rollout.options import independent as independent_options
from treepack.rollout.queries import QuerySources as QuerySources
from treepack.rollout.queries import read_queries as read_queries
from treepack.rollout.query import Query as Query
from treepack.rollout.records import tree_trajectories as tree_trajectories
from treepack.rollout.run import RolloutOptions as RolloutOptions
from treepack.rollout.run import sample_rollouts as sample_rollouts
from treepack.rollout.sampler import sample_tree as sample_tree
from treepack.rollout.servers.server import connect as connect
from treepack.rollout.summary import RolloutSummary as RolloutSummary
from treepack.train.logprobs import open_scoring as open_scoring
from treepack.train.logprobs import scored_rows as scored_rows
from treepack.trajectory import Tokens as Tokens
from treepack.trajectory import Trajectory as Trajectory
from treepack.trajectory import trajectories_from_arrays as trajectories_from_arrays
from treepack.trie.builders.in_memory import build_trie as build_trie
from treepack.trie.directory import TrieSummary as TrieSummary
from treepack.trie.directory import build_trie_directory as build_trie_directory
from treepack.trie.directory import read_to_trie as read_to_trie
from treepack.trie.store.slices import read_slice as read_slice
from treepack.trie.store.slices import trie_slices as trie_slices
from treepack.trie.store.trie_files import read_trie as read_trie
from treepack.trie.store.trie_files import write_trie as write_trie
from treepack.trie.trie import Trie as Trie

__version__: str
_HOME: dict[str, str]

__all__ = [
    "AdvantageOptions",
    "AdvantagesSummary",
    "BuildOptions",
    "CarryOptions",
    "Engine",
    "Environment",
    "LocalEngine",
    "LoraOptions",
    "MapScheduler",
    "PackOptions",
    "PackSummary",
    "PackedDataset",
    "Packing",
    "Plan",
    "Progress",
    "Provenance",
    "Query",
    "QuerySources",
    "RayScheduler",
    "ReadLog",
    "ReportOptions",
    "RolloutOptions",
    "RolloutSummary",
    "Row",
    "Sampling",
    "Scheduler",
    "SingleTurn",
    "StatsOptions",
    "Tokens",
    "Trajectory",
    "TreeOptions",
    "TreepackError",
    "Trie",
    "TrieSummary",
    "__version__",
    "allow_generation",
    "augment",
    "backward_row",
    "batch_logprobs",
    "batch_loss",
    "build_trie",
    "build_trie_directory",
    "build_trie_on",
    "check",
    "check_plan",
    "choose_objective",
    "collate",
    "concatenate_rows",
    "connect",
    "estimate_advantages",
    "estimate_pass_rates",
    "fit_values",
    "in_pieces",
    "independent_options",
    "load_engine",
    "load_model",
    "load_values",
    "make_batch",
    "merge_pieces",
    "micro_batches",
    "objective_loss",
    "open_fit",
    "open_scoring",
    "pack_rows",
    "pack_trie",
    "pack_trie_on",
    "plan_packing",
    "plan_pieces",
    "plan_rows",
    "predict_values",
    "read_queries",
    "read_rows",
    "read_slice",
    "read_to_trie",
    "read_trajectories",
    "read_trie",
    "register_attention",
    "row_factors",
    "row_logprobs",
    "row_loss",
    "row_objective",
    "row_scores",
    "row_value",
    "row_values",
    "sample_rollouts",
    "sample_tree",
    "scored_rows",
    "stats",
    "tokenize",
    "trajectories_from_arrays",
    "tree_attention",
    "tree_logprobs",
    "tree_trajectories",
    "trie_slices",
    "verify_gradients",
    "weighted_nll",
    "with_advantages",
    "write_advantages",
    "write_packed",
    "write_report",
    "write_trie",
]
