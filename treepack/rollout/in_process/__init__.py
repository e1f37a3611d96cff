"""An engine in this process, which samples from a loaded model."""
