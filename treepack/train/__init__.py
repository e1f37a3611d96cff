"""The trainer: its loop, ranks and sharding, checkpoints, metrics, and scoring with a trained model."""
