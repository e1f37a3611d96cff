"""Object stores and the hub: addresses read through one cache, and outputs that are uploaded."""
