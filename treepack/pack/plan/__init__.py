"""Assign trajectories to rows: packing methods, certified lower bounds, and an independent check of every plan."""
