"""Advantage estimators: from the rewards of a group, and from the tree of its rollouts."""
