"""Certified lower bounds on the tokens that any plan needs."""
