"""Files of rollouts as records, whatever they mean: which files, their bytes, and their syntax."""
