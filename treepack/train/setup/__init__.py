"""Open a run: data, model and options, checked before the first step."""
