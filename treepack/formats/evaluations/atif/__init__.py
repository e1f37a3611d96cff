"""Trajectories in ATIF, and trials of Harbor."""
