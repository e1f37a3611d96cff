"""Rollouts in memory: their log-probabilities, computed on trees, in the shape of the caller."""
