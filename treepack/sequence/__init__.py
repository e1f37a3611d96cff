"""Ranks that share the tokens of a row: each computes a part of the tokens, and all tokens of a part of the heads."""
