"""What a run writes: its directory, checkpoints and the model at the end."""
