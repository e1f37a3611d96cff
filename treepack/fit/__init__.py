"""Memory that may be too small: rungs from large to small, forecasts of bytes, and repetition after a shortage.

    RunPlan --rung--> the next smaller one          for training, scores, a critic, evaluation and batches in memory
    attempt, RunPlan --repeat--> result, RunPlan    an attempt that runs out of memory runs again on the next rung
    a pass that did not run --pass_memory--> bytes  rows in pieces: `limit`

`train.setup` measures a run and chooses its first rung, and `train.retry` repeats its steps.
"""
