"""Conversations, token ids and trees in common layouts."""
