"""PROS: queries that start with a prefix of a successful rollout, and the choice among them by pass rate."""
