"""The one exception that treepack raises on purpose.

Its message is one sentence for a person: where, what is wrong, what to do. The command line prints it to
stderr and exits 1; anything else that escapes is a bug.
"""


class TreepackError(Exception):
    """Bad input, bad options or damaged files; the message says where, what, and the remedy."""
