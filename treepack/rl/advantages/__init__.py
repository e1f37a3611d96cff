"""Advantage estimators: from the rewards of a group (flat), and from the tree of its rollouts (tree)."""
