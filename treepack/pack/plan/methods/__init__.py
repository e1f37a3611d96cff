"""Packing methods: each one plans one tree, or all trees of a forest, within a capacity."""
