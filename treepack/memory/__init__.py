"""The memory of machines and devices: free bytes, estimates for a model, and tensors that wait on the host."""
