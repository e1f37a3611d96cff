"""What a trie or a packed directory says: statistics, forecasts, causes of lost sharing, drawings and a report."""
