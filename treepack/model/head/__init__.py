"""The output layer and what is computed from it: log-probabilities, losses, values and gradients."""
