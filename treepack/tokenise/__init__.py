"""Rollouts of text to token ids: chat templates, tokenizers, and the spans of the tokens that the model wrote."""
