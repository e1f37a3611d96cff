"""A predictor of success from prefixes of rollouts: a backbone with a scalar head, fitted and run on packed rows."""
