"""Fields of a record: the facts of a rollout, the names of token records, and the fields that nothing reads."""
