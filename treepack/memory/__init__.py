"""What fits into memory: the budget of a machine, and estimates for a model."""
