"""TRACE: the number of rollouts for each prompt and each prefix, from predicted chances of success."""
