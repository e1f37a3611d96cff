"""Rollouts as trees inside TRL and verl."""
