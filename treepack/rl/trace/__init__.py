"""TRACE: which prompts and prefixes get how many rollouts, from predicted chances of success."""
