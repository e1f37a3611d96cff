"""Reinforcement learning on the trie: segments, leaf weights and advantages from the tree of rollouts.

    segments           Trie to SegmentTree: the tree that the sampler branched, node by node
    segment_cuts       the tokens where segments start
    leaf_weights       weights of the leaves of sampled trees and of continuations, which make means unbiased
    rollout_parts      rollouts that became several trajectories
    group_tree         the branches of one group in the trie, and the rollout that each rollout continues

    advantages.flat      grpo, dr_grpo, rloo, reinforce_pp     rewards of a group, compared with each other
    advantages.tree      treepo, treerpo, tree_grpo, treerl    rewards below a node, compared with its siblings or above
    advantages.advantage_options    the estimators by name, with their variants
    advantages.estimate  groups that can be used, any estimator by name, and the columns of a trie directory

All functions take and return arrays. No model is run.
"""
