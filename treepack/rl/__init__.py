"""Reinforcement learning on the trie: advantages and targets from the tree of rollouts, and the choice of new rollouts.

    segments           Trie to SegmentTree: the tree that the sampler branched, node by node
    segment_cuts       the tokens where segments start
    leaf_weights       weights of the leaves of sampled trees and of continuations, which make means unbiased
    group_tree         the branches of one group in the trie, and the rollout that each rollout continues

    advantages.flat      grpo, dr_grpo, rloo, reinforce_pp     rewards of a group, compared with each other
    advantages.tree      treepo, treerpo, tree_grpo, treerl    rewards below a node, compared with its siblings or above
    advantages.estimate  groups that can be used, any estimator by name, and the columns of a trie directory

    trace.targets      prefixes that can be continued, shares of successes below them, effective ratios, correlations
    trace.allocation   number of rollouts of each prompt and of continuations of each prefix (trace.greedy: the loops)
    trace.predictions  a file of predicted values, matched to a trie
    trace.expansion    allocations as tables for a rollout system
    trace.simulation   comparison of allocations on simulated rollouts (trace.worlds: their source)

    pros.augmentation  queries that start with the valuable prefix of a successful rollout (pros.signals: entropies)
    pros.selection     pass counts of queries, and the queries whose pass rate is nearest to 0.5
    pros.pass_rates    pass rates from a Gibbs sampler over the variables of pros.polya_gamma

All functions take and return arrays. No model is run.
"""
