"""Methods of single papers: TRACE, PROS, and the predictor of success.

    trace.targets      prefixes that can be continued, shares of successes below them, effective ratios, correlations
    trace.allocation   number of rollouts of each prompt and of continuations of each prefix (trace.greedy: the loops)
    trace.predictions  a file of predicted values, matched to a trie
    trace.expansion    allocations as tables for a rollout system
    trace.simulation   comparison of allocations on simulated rollouts (trace.worlds: their source)

    pros.augmentation  queries that start with the valuable prefix of a successful rollout (pros.signals: entropies)
    pros.selection     pass counts of queries, and the queries whose pass rate is nearest to 0.5
    pros.pass_rates    pass rates from a Gibbs sampler over the variables of pros.polya_gamma

    predictor          a model that predicts the values of prompts and prefixes: its rows, its head and its training
    contrast           shares of prefixes with mixed outcomes, for `treepack stats`

The core imports none of them.
"""
