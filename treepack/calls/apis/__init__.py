"""Requests to APIs of language models, and their responses."""
