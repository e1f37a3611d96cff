"""Files of a run: its directory, checkpoints and the model at the end."""
