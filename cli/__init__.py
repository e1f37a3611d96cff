"""The `treepack` command: click commands over the library, one file each.

A command's file is imported when the command runs, and its functions import slow modules in their bodies, so
`treepack --help` starts quickly. Results go to stdout, progress and notes to stderr. The exit status is 0, 1 for an
error in the input, and 2 for wrong usage. `streams` guards stdout and stderr, and `faults` reports unexpected
exceptions.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import NoReturn

import click

from treepack import __version__
from treepack.errors import TreepackError

from .streams import printable, standard_streams

SUMMARIES = {
    "advantages": "Compute advantages of a trie from its rewards.",
    "allocate": "Divide a budget of rollouts among prompts or prefixes.",
    "augment": "Write prefixes of successful rollouts as queries.",
    "build-trie": "Read rollouts and write their prefix tries.",
    "critic": "Write a critic's values of all tokens into a trie.",
    "formats": "List the formats of rollouts that are read.",
    "logprobs": "Write a model's log-probabilities into packed rows.",
    "pack": "Pack a trie into rows of a given capacity.",
    "prepare": "Read and pack rollouts in one command.",
    "report": "Write a page or pictures of the sharing of rollouts.",
    "rollout": "Sample rollouts from an engine, as trees or one by one.",
    "select": "Choose queries by their estimated pass rate.",
    "show": "Show a tree, a rollout or a packed row.",
    "simulate": "Simulate rollouts to compare ways to spend them.",
    "stats": "Measure the sharing of rollouts, and forecast the speed-up.",
    "train": "Train a Hugging Face model on packed rows.",
    "values": "Fit and run a predictor of success for prefixes.",
}
"""One line for each command, because the docstrings are in files that are not imported for the list."""


class LazyCommands(click.Group):
    """The group of all commands; each is imported when it is looked up."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted(SUMMARIES)

    def get_command(self, ctx: click.Context | None, cmd_name: str) -> click.Command | None:
        """Return the command `cmd_name` from the file with its name, or None if there is none."""
        if cmd_name not in SUMMARIES:
            return None
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(import_module(f".{name}", __package__), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from `SUMMARIES`."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, SUMMARIES[name]) for name in self.list_commands(ctx)])


@click.group(cls=LazyCommands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def commands() -> None:
    """Train on trees of agent rollouts, computing every shared prefix once.

    \b
    treepack build-trie rollouts/ --tokenizer MODEL --out trie
    treepack pack trie --capacity 8192 --out packed
    treepack stats packed --check
    treepack train packed --model MODEL --out trained

    A path may also be an address: s3:// and gs:// for inputs and outputs, hf:// for inputs.
    """


def main() -> None:
    """Run the command line; a TreepackError becomes one sentence on stderr and exit status 1."""
    with standard_streams():
        _run()


def _run() -> None:
    try:
        commands()
    except TreepackError as error:
        from treepack.files.remote.cache import addresses_in

        _stop(addresses_in(str(error)))
    except MemoryError:
        _stop("memory ran out; read fewer inputs at once, or use fewer --workers")
    except Exception as error:
        from .faults import describe_fault

        _stop(describe_fault(error))


def _stop(sentence: str) -> NoReturn:
    click.echo(f"treepack: {printable(sentence)}", err=True)
    sys.exit(1)
