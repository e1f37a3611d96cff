"""Certified lower bounds on the tokens of any plan."""
