"""Trees, rollouts and packed rows as lines of text for a terminal.

    Trie, Trajectory or Row --forest--> Forest --drawing(--decoding, wrapping)--> Line, Line, ...
                                               --record--> a plain object for JSON

A `Line` is a tuple of `Span`s, text with the name of a style; whoever prints decides whether styles become colours.
What is trained is marked in the text itself. Nothing that comes from a rollout can drive a terminal: every character
that is not printable is written as an escape. `selection` finds what a user names.
"""
