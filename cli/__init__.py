"""The `treepack` command: click commands over the library, one file each.

A command's file is imported when the command runs, and its functions import slow modules in their bodies, so
`treepack --help` starts quickly. Results go to stdout, progress and notes to stderr. The exit status is 0, 1 for an
error in the input, 2 for wrong usage, and 3 for a training run that a signal stopped. `streams` guards stdout and
stderr, and `faults` reports unexpected exceptions.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, NoReturn

import click

from treepack import __version__
from treepack.errors import TreepackError, torch_hint

from .choices import guess
from .launch import wait_for_first_rank
from .other_names import refuse_known
from .streams import printable, standard_streams

GROUPS = {
    "Look at data": {
        "stats": "Measure the sharing of rollouts, and forecast the speed-up.",
        "report": "Write a page or pictures of the sharing of rollouts.",
        "show": "Show a tree, a rollout or a packed row.",
        "formats": "List the formats of rollouts that are read.",
        "models": "List the models that train exactly, and their costs.",
    },
    "Prepare data": {
        "prepare": "Read and pack rollouts in one command.",
        "build-trie": "Read rollouts and write their prefix tries.",
        "advantages": "Compute advantages of a trie from its rewards.",
        "pack": "Pack a trie into rows of a given capacity.",
    },
    "Train and run a model": {
        "train": "Train a Hugging Face model on packed rows.",
        "logprobs": "Write a model's log-probabilities into packed rows.",
        "critic": "Write a critic's values of all tokens into a trie.",
    },
    "Make rollouts": {
        "rollout": "Sample rollouts from an engine, as trees or one by one.",
        "select": "Choose queries by their estimated pass rate.",
        "augment": "Write prefixes of successful rollouts as queries.",
        "values": "Fit and run a predictor of success for prefixes.",
        "allocate": "Divide a budget of rollouts among prompts or prefixes.",
        "simulate": "Simulate rollouts to compare ways to spend them.",
    },
}
"""One line for each command, because the docstrings are in files that are not imported for the list."""

SUMMARIES = {name: line for group in GROUPS.values() for name, line in group.items()}
_VERSIONS = ("torch", "triton", "transformers")  # the packages whose versions belong into a report of a fault


class _LazyCommands(click.Group):
    """The group of all commands; each is imported when it is looked up."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted(SUMMARIES)

    def get_command(self, ctx: click.Context | None, cmd_name: str) -> click.Command | None:
        """Return the command `cmd_name` from the file with its name, or None if no such command exists."""
        if cmd_name not in SUMMARIES:
            return None
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(import_module(f".{name}", __package__), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of the arguments, and guess which one is meant by an unknown name."""
        if args[0] not in SUMMARIES and not args[0].startswith("-"):
            ctx.fail(f"No such command {args[0]!r}.{guess(args[0], SUMMARIES)}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; its errors name options instead of fields, and one rank of several prints them."""
        try:
            return self._invoke(ctx)
        except (TreepackError, click.UsageError) as error:
            wait_for_first_rank(str(error))
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            if command is not None and isinstance(error, TreepackError):
                from .option_groups import as_typed

                error.args = (as_typed(str(error), command),)
            raise
        except (SystemExit, EOFError) as error:  # of foreign code; click would end without a sentence, or with status 0
            if isinstance(error.__context__, BrokenPipeError):  # rich exits then; click ends without a word
                raise error.__context__ from None
            _stop_by_fault(error)

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            refuse_known(error, ctx.invoked_subcommand)
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in their groups."""
        for heading, group in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([*group.items()])


def _print_versions(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    """Print the versions of treepack and of the packages that a run depends on, and end the command."""
    if not value or ctx.resilient_parsing:
        return
    from importlib.metadata import PackageNotFoundError, version

    from treepack.native.library import is_compiled

    click.echo(f"treepack {__version__}")
    for name in _VERSIONS:
        try:
            click.echo(f"{name} {version(name)}")
        except PackageNotFoundError:
            click.echo(f"{name} is not installed")
    click.echo("loops in C: " + ("yes" if is_compiled() else "no, so that packing takes up to 100 times longer"))
    ctx.exit()


@click.group(cls=_LazyCommands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_versions,
    help="Show the versions of treepack, torch, triton and transformers, and exit.",
)
def commands() -> None:
    """Train on trees of agent rollouts, computing every shared prefix once.

    \b
    treepack prepare rollouts/ --tokenizer MODEL --out data
    treepack stats data
    treepack train data --model MODEL --out trained

    A path may also be an address: s3:// and gs:// for inputs and outputs, hf:// for inputs.
    """


def main() -> None:
    """Run the command line; a TreepackError becomes one sentence on stderr and exit status 1."""
    with standard_streams():
        _run()


def _run() -> None:
    try:
        commands(prog_name="treepack")  # also under python -m
    except TreepackError as error:
        from treepack.files.remote.cache import addresses_in

        _stop(addresses_in(str(error)))
    except ModuleNotFoundError as error:
        if error.name != "torch":
            _stop_by_fault(error)
        _stop(f"this command needs torch, which is not installed; {torch_hint()}")
    except (SystemExit, KeyboardInterrupt):  # of click
        raise
    except BaseException as error:
        _stop_by_fault(error)


def _stop_by_fault(error: BaseException) -> NoReturn:
    from .faults import describe_fault

    _stop(describe_fault(error))


def _stop(sentence: str) -> NoReturn:
    click.echo(f"treepack: {printable(sentence)}", err=True)
    sys.exit(1)
