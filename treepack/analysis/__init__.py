"""Analyses of a trie or a packed directory: statistics, forecasts, causes of lost sharing, drawings and a report."""
