"""Raw files to tokenised trajectories: options, the readers of all formats, and one stream with counts."""
