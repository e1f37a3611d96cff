"""A page about a training run, while it runs and afterwards.

    metrics.jsonl --metrics_tail--> records --run_series--> columns --curves--> charts, and later their new points
    run.json, lock --run_state--> RunState: running, finished, stopped, died
    run.json, packed rows --step_rows--> rows of each step --step_rollouts--> blocks of the explorer
    all of these --facts--> figures and tables --run_page--> HTML

`watch` keeps these up to date, `server` sends them to browsers on this machine, and `write_run` writes them into one
file. `__main__` is the process that `treepack train --report-to page` starts. The page is run.html with run.js; theme,
charts and explorer are shared with the page about sharing, in the folder above.
"""
