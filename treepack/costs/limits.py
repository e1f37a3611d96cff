"""Numbers that costs, plans and the trainer share; imports no numerical library."""

MAX_TOKEN_PAIRS = 10**8  # score pairs, the largest cost of a token: the cost of 10^10 tokens still fits int64
# A pass of so many tokens keeps an H100 busy longer than the processor needs for its launches, for models from 0.6
# billion weights on. The trainer joins rows up to it.
PASS_TOKENS = 32_768
