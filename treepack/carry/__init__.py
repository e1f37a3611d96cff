"""Rows in pieces: each token computed once, with the keys and values of its path carried from piece to piece."""
