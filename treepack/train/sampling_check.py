"""Compare recorded log-probabilities with the model's own ones, and their dtype with the run's, before the first step.

    recorded s_t of the terms of a row, own logp_t at the temperature of each term    gap = mean |s_t - logp_t|
    the same at T = 0.3, 0.4, ... 2.0                                                  gap_T
    the same as gap, but with recorded values moved by one token                       gap_shifted

Rounding of the sampler and some steps of training between sampler and trainer give a small gap that no other
temperature explains. A large gap, or one that another explanation at least halves, means that the two are not of one
distribution, and then ratios and importance weights are wrong. The result is one sentence for the user, never an error.

    manifest: logprobs.ref.dtype "bf16", run in fp32     size = mean |logp in bf16 - logp in fp32| of the own model

The ratios and divergences of such values contain this rounding: the divergence of a model from itself is not 0.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from treepack.data.batch import Batch, TermTensors
from treepack.data.mixture import sources_of
from treepack.data.prefetch import read_pass
from treepack.data.ragged_tensor import join_ragged
from treepack.model.head.token_loss import filled_temperature
from treepack.model.term_objective import loss_sets, loss_temperature
from treepack.objectives.needed_columns import optional_columns
from treepack.objectives.row_numbers import ScoreRequest
from treepack.train.pieces import has_long_rows, row_runner
from treepack.train.run import TrainingRun
from treepack.train.setup.smaller_run import fit_forward
from treepack.train.sharding import whole_weights
from treepack.train.step import step_memory_errors

# Candidates for the temperature of the recorded values: the usual ones, and their neighbours.
_TEMPERATURES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.1, 1.2, 1.3, 1.5, 2.0)
_MAX_TERMS = 512  # terms of each rank that are compared; each is computed at every temperature

# In nats per token. A sampler in bf16 and a trainer that is some updates ahead differ by up to about 0.02; ratios
# beyond e^0.5 are outside the clip range of every loss.
NOISE, UNRELATED = 0.02, 0.5
CLEAR, BETTER = 0.25, 0.5  # gap of an explanation over the gap that it explains
_ONE_SIDED = 0.97  # share of the differing tokens whose recorded value is the larger one
_BYTES = {"fp32": 4, "bf16": 2}  # of a number in the dtypes of runs


@dataclass(frozen=True)
class _SamplingGap:
    """Mean differences of recorded and own log-probabilities, in nats, over the compared terms of all ranks.

    Attributes:
        num_terms: the number of compared terms.
        gap: mean |recorded - own| at the temperatures of the run.
        mean: the same without absolute values.
        at: the gap at each of `_TEMPERATURES`.
        shifted: the gap if each recorded value belongs to the token before it, or after it.
        larger: the share of terms with a larger recorded value, among terms that differ by more than 0.01.
    """

    num_terms: int
    gap: float
    mean: float
    at: dict[float, float]
    shifted: tuple[float, float]
    larger: float


def compare_sampling(run: TrainingRun) -> str | None:
    """Return a sentence if recorded and own log-probabilities cannot be of one distribution, else None.

    Every rank must call this function; it runs one row of the first step on each of them, without gradients. None if
    the loss has no terms of a sampler, or the data has no recorded values.
    """
    objective = run.options.objective
    if not objective.is_policy or "term_sampling_logprob" not in run.dataset.term_columns:
        return None
    found = measure_gap(run)
    return None if found is None else _describe_gap(found, run)


def measure_gap(run: TrainingRun) -> _SamplingGap | None:
    """Compare one row of the first step on every rank; None if it has no recorded values."""
    rows = run.passes(run.schedule[0].rows)[0][:1]
    batch = read_pass(run.dataset, rows)
    own = fit_forward(run, lambda tried: _sums(tried, batch), rows)[0].to(run.loaded.device)
    sums = run.ranks.sum(own * run.ranks.counts_rows).tolist()
    count, gap, mean, larger, different, *rest = sums
    if not count:
        return None
    num = len(_TEMPERATURES)
    (before, num_before), (after, num_after) = rest[num : num + 2], rest[num + 2 :]
    return _SamplingGap(
        num_terms=int(count),
        gap=gap / count,
        mean=mean / count,
        at={t: total / count for t, total in zip(_TEMPERATURES, rest[:num], strict=True)},
        shifted=(before / max(num_before, 1), after / max(num_after, 1)),
        larger=larger / max(different, 1),
    )


def _sums(run: TrainingRun, batch: Batch) -> Tensor:
    """Return count, sums of |d|, d, [d > .01], [|d| > .01], sums of |d| by temperature, and sum and count by shift."""
    loaded, terms = run.loaded, batch.terms
    assert terms is not None
    chosen, recorded = _choose_terms(terms)
    tokens = terms.tokens[terms.index[chosen].long()]
    temperature = filled_temperature(terms.temperature, run.options.objective.temperature)
    if not isinstance(temperature, Tensor):
        temperature = torch.full((len(terms.tokens),), temperature)
    # All temperatures in one pass: tokens [4, 7] at [.7, 1] -> [4, 7, 4, 7, ...] at [.7, 1, .3, .3, .4, .4, ...]
    columns = [temperature[terms.index[chosen].long()].float(), *(torch.full((len(tokens),), t) for t in _TEMPERATURES)]
    divisors = torch.cat(columns).to(loaded.device)
    every = tokens.to(loaded.device).repeat(len(columns))
    kept = None
    if terms.kept_ids is not None:
        sets = [terms.kept_ids[terms.index[chosen].long()]] * len(columns)
        kept = join_ragged(sets).map(lambda each: each.to(loaded.device))
    whole = whole_weights(loaded) if has_long_rows(run, run.schedule[0].rows) else nullcontext()
    # Eager, because layers that --compile prepared would be compiled again for a pass without gradients.
    with torch.no_grad(), whole, torch.compiler.set_stance("force_eager"), step_memory_errors(batch):
        runner, reads = row_runner(run, batch), ScoreRequest(entropies=False)
        scores = runner.scores(batch, every, reads, temperature=divisors, kept=kept)
    assert scores.logprobs is not None
    own = scores.logprobs.double().cpu().reshape(len(columns), -1)  # [1 + temperatures, terms]
    if loaded.root is not None:
        loaded.root.reshard()  # a forward pass without a backward pass leaves the root gathered
    differences = recorded[chosen] - own
    d = differences[0]
    values = [d.new_tensor(len(d)), d.abs().sum(), d.sum(), (d > 0.01).sum(), (d.abs() > 0.01).sum()]
    values += differences[1:].abs().sum(1).unbind()
    for step in (-1, 1):
        gap = (_moved(recorded, terms, step)[chosen] - own[0]).abs()
        values += [gap.nansum(), (~gap.isnan()).sum()]
    return torch.stack([value.double() for value in values])


def _choose_terms(terms: TermTensors) -> tuple[Tensor, Tensor]:
    """Return at most `_MAX_TERMS` evenly spaced terms with a recorded value, int64, and the values of all terms."""
    if terms.sampling_logprob is None:
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64)
    known = terms.sampling_logprob.isfinite().nonzero().squeeze(-1)
    # 10 terms, at most 4 of them -> places 0, 3, 6, 9
    places = torch.linspace(0, len(known) - 1, min(_MAX_TERMS, len(known))).long()
    return known[places], terms.sampling_logprob.double()


def _moved(recorded: Tensor, terms: TermTensors, step: int) -> Tensor:
    """Return the recorded value of the term `step` entries after each term in its trajectory; NaN if none."""
    # step 1, trajectory [0, 0, 1], recorded [a, b, c] -> [b, nan, nan]
    values, owners = torch.roll(recorded, -step), torch.roll(terms.trajectory, -step)
    moved = torch.where(owners == terms.trajectory, values, torch.nan)
    if len(moved):
        moved[-1 if step > 0 else 0] = torch.nan  # roll wraps around
    return moved


def _describe_gap(found: _SamplingGap, run: TrainingRun) -> str | None:
    """Return the sentence for the user; None if the values may be of one distribution."""
    if not found.gap > NOISE:
        return None
    start = (
        f"the sampler's recorded log-probabilities differ from the model's own ones by {found.gap:.3f} nats per token "
        f"({found.num_terms:,} tokens of the first step, {_temperature_phrase(run)})"
    )
    temperature = min(found.at, key=found.at.__getitem__)
    shift = min(found.shifted)
    best = min(found.at[temperature], shift)
    if best <= CLEAR * found.gap or (best <= BETTER * found.gap and found.larger < _ONE_SIDED):
        if shift == best:
            return (
                f"{start}, but by {shift:.3f} if they are moved by one token: give every token its own "
                "log-probability, not that of the token before or after it"
            )
        return f"{start}, but by {best:.3f} at the temperature {temperature:g}: {_temperature_remedy(run, temperature)}"
    if found.larger >= _ONE_SIDED and found.gap < UNRELATED:
        return (
            f"{start} and are larger for {found.larger:.0%} of them, as after top-p, top-k or min-p: record the token "
            "ids that these keep (kept_ids), sample without them, or record log-probabilities of the whole distribution"
        )
    if found.gap > UNRELATED:
        return (
            f"{start}, and no temperature explains this: they come from a different policy, or the tokenizer or chat "
            "template of the data differs; train the policy that sampled the rollouts"
        )
    return None


def _temperature_phrase(run: TrainingRun) -> str:
    if "term_temperature" in run.dataset.term_columns:
        return "at the temperatures of the data"
    return f"at the temperature {run.options.objective.temperature or 1:g}"


def _temperature_remedy(run: TrainingRun, temperature: float) -> str:
    option = run.options.objective.temperature
    raw = (
        "they were recorded before the logits were divided by the temperature; record them after it (in vLLM, "
        "logprobs_mode='processed_logprobs')"
    )
    if "term_temperature" in run.dataset.term_columns:
        return raw if temperature == 1 else "the temperatures of the data are not the sampler's; correct them"
    if option is None:
        return f"the sampler's temperature was not 1; train with --temperature {temperature:g}, if that was it"
    return f"if --temperature {option:g} is right, {raw}" if temperature == 1 else "correct --temperature"


def compare_dtypes(run: TrainingRun) -> str | None:
    """Return a sentence about columns that the loss reads and that have another dtype than the run; None if none has.

    Every rank must call this function, which then runs one row of the first step in both dtypes, without gradients.
    """
    objective, own = run.options.objective, run.options.dtype
    if not objective.is_policy and not objective.has_pairs:
        return None
    found: dict[str, str] = {}
    for name in (*objective.columns, *optional_columns(objective)):
        for source in sources_of(run.dataset):
            column = name.removeprefix("term_").removesuffix("_logprob")
            entry = (source.manifest.get("logprobs") or {}).get(column) or {}
            if entry.get("dtype", own) != own and name in source.term_columns:
                found[column] = str(entry["dtype"])
    if not found:
        return None
    columns = ", ".join(f"{name} in {dtype}" for name, dtype in found.items())
    return (
        f"log-probabilities have another dtype than this run's {own} ({columns}), and {_size(run, found)}: the first "
        f"ratios and divergences contain that; compute them again with `treepack logprobs --dtype {own}`, or train in "
        "their dtype"
    )


def _size(run: TrainingRun, found: dict[str, str]) -> str:
    dtypes = {run.options.dtype, *found.values()}
    lowered = any(p.is_floating_point() and p.element_size() < _BYTES["fp32"] for p in run.loaded.model.parameters())
    if lowered or not dtypes <= _BYTES.keys():  # an adapter's base is in bf16 alone
        return "they differ by about 0.01 nats per token"
    rows = run.passes(run.schedule[0].rows)[0][:1]
    batch = read_pass(run.dataset, rows)
    sums = fit_forward(run, lambda tried: _difference(tried, batch), rows)[0].to(run.loaded.device)
    total, count = run.ranks.sum(sums * run.ranks.counts_rows).tolist()
    return f"this model's own differ by {total / max(count, 1):.1e} nats per token between the two"


def _difference(run: TrainingRun, batch: Batch) -> Tensor:
    """Return the sum of |logp in bf16 - logp in fp32| over the trained tokens of a row, and their number; float64."""
    loaded, terms, objective = run.loaded, batch.terms, run.options.objective
    if terms is None or not len(terms.tokens):
        return torch.zeros(2, dtype=torch.float64)
    temperature, kept = loss_temperature(terms, objective), loss_sets(terms, objective)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(loaded.device)
    if kept is not None:
        kept = kept.map(lambda each: each.to(loaded.device))
    scores = []
    for dtype in _BYTES:
        whole = whole_weights(loaded) if has_long_rows(run, run.schedule[0].rows) else nullcontext()
        # Eager, because layers that --compile prepared would be compiled again for a pass without gradients.
        with torch.no_grad(), whole, torch.compiler.set_stance("force_eager"), step_memory_errors(batch):
            runner = row_runner(replace(run, options=replace(run.options, dtype=dtype)), batch)
            reads = ScoreRequest(entropies=False)
            own = runner.scores(batch, terms.tokens.to(loaded.device), reads, temperature=temperature, kept=kept)
        assert own.logprobs is not None
        scores.append(own.logprobs.double().cpu())
        if loaded.root is not None:
            loaded.root.reshard()  # a forward pass without a backward pass leaves the root gathered
    gap = (scores[0] - scores[1]).abs()
    return torch.stack([gap.sum(), gap.new_tensor(len(gap))])
