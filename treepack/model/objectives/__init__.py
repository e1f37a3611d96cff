"""Losses over terms, their denominators, and the columns that they need."""
