"""Input files as records: which files, their bytes, their syntax, and the copies among them."""
