"""Models of transformers on packed rows: loading, forward passes, losses and verification."""
