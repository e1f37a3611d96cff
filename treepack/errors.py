"""The one exception that treepack raises on purpose.

Its message is one sentence for a person: the place, the problem and the remedy. The command line prints the message to
stderr and exits with status 1. Any other exception that reaches the user is a bug.
"""


class TreepackError(Exception):
    """Bad input, bad options or damaged files; the message names the place, the problem and the remedy."""
