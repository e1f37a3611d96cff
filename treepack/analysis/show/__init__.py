"""Trees, rollouts and packed rows as lines of text for a terminal.

    Trie, Trajectory or Row --forest--> DrawnForest --drawing, nodes, bodies (decoding, wrapping)--> Text, Text, ...
                                                    --views.as_json--> a plain object for JSON

A line is a `rich.text.Text`: plain text with style names. The caller that prints it decides whether it has colours.
Trained tokens are marked in the text itself. Nothing in a rollout can drive a terminal: every character that is not
printable is written as an escape, and rich markup in a rollout stays text. `selection` looks up the groups,
trajectories and rows that a user names.
"""
