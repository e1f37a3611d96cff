"""Methods of single papers: TRACE, PROS, and the predictor of success."""
