"""The output layer, and the log-probabilities, losses, values and gradients that it gives."""
