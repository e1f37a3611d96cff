"""Options of a command from a file: --config FILE for every command, and --from-run RUN for train.

    lr = 1e-5                    run.toml: a key is an option without its dashes, or the name of an argument
    report-to = ["page"]
    [train]                      a table that only treepack train reads; tables of other commands are passed over
    rows-per-step = 4

    treepack train --config run.toml --lr 3e-6       options of the command line count more than the file

The values become click's defaults of the parameters, so each is checked as if it were typed. Each error names the file,
the line and the key. A run.json is a file of train too: `train.saving.run_config` makes its table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from .choices import guess
from .other_names import replacement
from .progress import quiet_option

_F = TypeVar("_F", bound=Callable[..., Any])
_UNUSED = {"config", "from_run", "help"}


def _load(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    if path is None or context.resilient_parsing:
        return
    if path.suffix == ".json":
        _add_run(context, path)
        return
    table, lines = _read(path, context.command.name or "")
    values = {}
    for key, value in table.items():
        where = f"{path}:{lines[key]}: {key}" if key in lines else f"{path}: {key}"
        parameter = _parameters(context.command).get(key.replace("-", "_"))
        if parameter is None:
            raise click.UsageError(f"{where} {_unknown(key, context)}")
        try:
            values[parameter.name] = _as_typed(parameter, value)
            parameter.type_cast_value(context, values[parameter.name])
        except click.BadParameter as error:
            raise click.UsageError(f"{where}: {error.message}") from error
    context.default_map = {**(context.default_map or {}), **values}


def _load_run(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    if path is not None and not context.resilient_parsing:
        _add_run(context, path / "run.json")


def _add_run(context: click.Context, path: Path) -> None:
    """Add the data, model and options of a run, which count less than a file."""
    if context.command.name != "train":
        raise click.UsageError(f"{path}: is for treepack train, which wrote it; give a TOML file to --config")
    from treepack.train.saving.run_config import run_config

    parameters = _parameters(context.command)
    values = {parameters[key].name: _as_typed(parameters[key], value) for key, value in run_config(path).items()}
    context.default_map = {**values, **(context.default_map or {})}


def common_options(command: _F) -> _F:
    """Add the options of all commands: --config and --quiet."""
    return click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=_load,
        help="TOML file with options of this command, such as `capacity = 4096`, also in a table of its name; options "
        "of the command line count more.",
    )(quiet_option(command))


from_run_option = click.option(
    "--from-run",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="RUN",
    is_eager=True,
    expose_value=False,
    callback=_load_run,
    help="Take data, model and options from this run, all but --out; other options count more. --config RUN/run.json "
    "is the same.",
)
"""The option of a command that repeats a training run."""


def _parameters(command: click.Command) -> dict[str, click.Parameter]:
    """Return the parameters by their keys: --lora-rank -> lora_rank, PACKED -> packed."""
    named = {}
    for each in command.params:
        names = each.opts if isinstance(each, click.Option) else [each.human_readable_name, each.name or ""]
        for name in names:
            key = re.sub(r"[^\w]+", "_", name).strip("_").lower()  # "INPUT..." -> input
            if key not in _UNUSED and (isinstance(each, click.Argument) or name.startswith("--")):
                named[key] = each
    return named


def _unknown(key: str, context: click.Context) -> str:
    """Return the end of the sentence about an unknown key."""
    names = [name.replace("_", "-") for name in _parameters(context.command)]
    command, option = context.command_path.partition(" ")[2], f"--{key.replace('_', '-')}"
    if (answer := replacement(command, option, [f"--{name}" for name in names])) is not None:
        return answer
    return f"is not an option of {context.command_path}.{guess(key, names)}"


def _as_typed(parameter: click.Parameter, value: Any) -> Any:
    """Return a value of a file as the command line has it: [0.9, 0.95] -> "0.9,0.95", and of a repeated option a list.

    Raises:
        BadParameter: the value has a wrong kind.
    """
    if getattr(parameter, "is_flag", False) or parameter.type is click.BOOL:
        if not isinstance(value, bool):
            raise click.BadParameter("expected true or false")
        return value
    if getattr(parameter, "multiple", False) or parameter.nargs == -1:
        # {tau = 2} -> ["tau=2"]
        values = [f"{name}={each}" for name, each in value.items()] if isinstance(value, Mapping) else value
        return [_word(each) for each in (values if isinstance(values, list) else [values])]
    return ",".join(map(_word, value)) if isinstance(value, list) else _word(value)


def _word(value: Any) -> str:
    if isinstance(value, bool | Mapping | list):
        raise click.BadParameter("expected a number or a text")
    return str(value)


def _read(path: Path, command: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the keys of `path` for a command, and their lines, except uncertain ones.

    Raises:
        UsageError: the file is not TOML, or has a table that no command reads.
    """
    import tomllib

    from . import SUMMARIES

    try:
        text = path.read_text("utf-8")
        table = tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{path}: cannot be read as TOML ({error}); write lines such as lr = 1e-5") from error
    own = table.get(command, {})
    plain = {key: value for key, value in table.items() if key not in SUMMARIES or not isinstance(value, dict)}
    if repeated := [key for key in own if _same(key, plain)]:
        raise click.UsageError(f"{path}: {repeated[0]} is also in [{command}]; give it once")
    return {**plain, **own}, _lines(text, ["", command], {**plain, **own})


def _same(key: str, keys: Iterable[str]) -> bool:
    return key.replace("-", "_") in {each.replace("-", "_") for each in keys}


def _lines(text: str, tables: list[str], keys: Iterable[str]) -> dict[str, int]:
    """Return the line of each key that begins one line alone in these tables, and no line of a file with long texts."""
    found: dict[str, list[int]] = {key: [] for key in keys}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*[\"']?([^\"'\]]+?)[\"']?\s*\]", line):
            table = header[1]
            if table in found:
                found[table].append(number)
        elif table in tables and (key := re.match(r"\s*[\"']?([\w-]+)[\"']?\s*[.=]", line)) and key[1] in found:
            found[key[1]].append(number)
    is_sure = '"""' not in text and "'''" not in text
    return {key: numbers[0] for key, numbers in found.items() if is_sure and len(numbers) == 1}
