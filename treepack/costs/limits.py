"""The largest cost of a token that plans can add up; imports no numerical library."""

MAX_TOKEN_PAIRS = 10**8  # score pairs; the cost of 10^10 tokens still fits int64
