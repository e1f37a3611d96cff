"""A predictor of success for prefixes: a backbone with a scalar head, fitted and run on packed rows."""
