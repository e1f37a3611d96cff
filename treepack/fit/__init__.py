"""Memory that may be too small: measured bytes, rungs from large to small, and repetition after a shortage.

    model --measure--> ModelProbe                   a few passes before the first step; `pass_memory` explains the bytes
    ModelProbe, rows, free bytes --climb--> RunPlan     the first rung that fits
    RunPlan --rung--> the next smaller one          for training, scores, a critic, evaluation and batches in memory
    attempt, RunPlan --repeat--> result, RunPlan    an attempt that runs out of memory runs again on the next rung

`train.setup` calls the first two for a run, and `train.retry` repeats its steps.
"""
