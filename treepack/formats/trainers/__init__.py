"""Rollouts, samples and data sets that trainers write or read."""
