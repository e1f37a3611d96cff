"""Operations of a model, from its config.json."""
