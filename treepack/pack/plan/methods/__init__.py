"""Packing methods: each plans one tree, or a whole forest, under a capacity."""
