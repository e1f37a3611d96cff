"""Training on packed rows: `setup.opening.open_run` opens a run, and `loop.train` carries it out.

`packed` and `options` go one way, through functions that each return a value of their own:

    options                setup.compute.choose_compute     device and dtype
    packed, options        setup.run_data.open_data         rows, steps and blocks, also of held-out rows
    model, options         setup.run_model.load_run_model   the model, its layers as far as the options name them
    rows, model            setup.run_model.check_fit        refusals, tokenizer, notes
    rows, model, options   setup.run_memory.choose_memory   one `rung.RunPlan`: compile, layers, pieces, passes
    all of these           setup.opening.open_run           `run.TrainingRun`, built once; no option is "auto" now
    run                    loop.train -> step.train_step    passes of rows to gradients, one update a step
    run, steps             saving, watch                    run.json, checkpoints, the model; metrics and trackers
"""
