"""Calls of a model that belong to one rollout, as its trajectories."""
