"""Raw files to tokenised trajectories: readers, chat templates, tokenisation, one stream with counts."""
