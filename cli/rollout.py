"""`treepack rollout`: sample rollouts from an engine, as trees or one by one.

The sampling is `treepack.rollout`. This file reads options, connects the engine with prompts, rewards and the output,
and prints a summary.
"""

from __future__ import annotations

import asyncio
import math
import os
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from .config import common_options
from .devices import check_device
from .option_groups import is_given
from .output import lock_until_end, percent, quoted, show, show_end
from .paths import READ, WRITE
from .progress import progress_bars
from .rollout_inputs import (
    EngineOptions,
    PromptOptions,
    WorldOptions,
    engine_options,
    prompt_options,
    world_options,
)
from .rollout_options import run_options, sampling_options, tree_options
from .sections import SectionedCommand

if TYPE_CHECKING:
    from treepack.files.remote.address import AnyPath
    from treepack.rollout.engine import Engine
    from treepack.rollout.episode import Episode
    from treepack.rollout.options import RolloutOptions, Sampling, TreeOptions
    from treepack.rollout.queries import QueryFile
    from treepack.rollout.query import Query
    from treepack.rollout.run import StartEpisode
    from treepack.rollout.servers.server import SampleText
    from treepack.rollout.summary import RolloutMeans, RolloutSummary
    from treepack.trajectory import Int32

_SAMPLE_TEXT = "A tree of rollouts, 3 of 16 leaves."  # to compare two tokenizers


@click.command(cls=SectionedCommand)
@click.argument("path", metavar="PROMPTS", type=READ)
@engine_options
@tree_options
@click.option("--out", type=WRITE, required=True, help="File to append rollouts to, as JSON lines.")
@prompt_options
@world_options
@sampling_options
@run_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@common_options
def rollout(
    path: AnyPath,
    engine: EngineOptions,
    tree: tuple[str, TreeOptions],
    out: AnyPath,
    prompt: PromptOptions,
    world: WorldOptions,
    sampling: Sampling,
    run: RolloutOptions,
    as_json: bool,
) -> None:
    """Sample rollouts of PROMPTS from an engine, with token ids, log-probabilities and the weights of leaves.

    PROMPTS is JSON lines or Parquet: records with token ids, messages or text, or a table that treepack allocate,
    augment or select has written. The output is read by treepack build-trie. Each tree is written when it is complete,
    so a run that was interrupted loses none, and --resume continues it.
    """
    import orjson

    from treepack.rollout.output import check_output
    from treepack.rollout.rewards import as_reward
    from treepack.rollout.user_code import load_callable

    sampler, options = tree
    lock_until_end(check_output(out, resume=run.resume))  # before a model is loaded, which may take minutes
    _check_engine(engine)
    function = None if world.function is None else load_callable(world.function)
    if function is not None and world.environment is None:
        function = as_reward(function)
    tokenizer = _tokenizer(prompt.tokenizer, engine)
    queries = _queries(path, prompt, world, tokenizer, sampler)
    if world.answer is not None:
        options = replace(options, is_answer=_answer(world.answer, tokenizer))
    sampling = _with_stop_tokens(sampling, engine, tokenizer)  # from here on, a model imports torch
    start = None if function is None else _start(world, function, tokenizer, sampling)
    settings = {"sampler": sampler, "step": prompt.step, **asdict(world)}
    if engine.keep_routes:
        settings["keep_routes"] = True
    with progress_bars() as progress:

        async def sample() -> RolloutSummary:
            from treepack.rollout.run import sample_rollouts

            opened, model = await _open(engine, sampling, tokenizer)
            try:
                named = replace(run, settings={"model": model, **settings})
                return await sample_rollouts(
                    queries.queries, opened, options, out=out, run=named, start=start, progress=progress
                )
            finally:
                await opened.close()

        try:
            summary = asyncio.run(sample())
        except KeyboardInterrupt:
            click.echo(f"note: finished trees are in {out}; continue with --resume", err=True)
            raise
    if as_json:
        click.echo(orjson.dumps(_figures(summary, queries.num_unused)))
    else:
        _show(summary, queries.num_unused, independent=sampler == "independent", is_server=engine.is_server)
    rewarded = "" if summary.reward is None else "--advantages grpo "
    template = "" if prompt.chat_template is None else f"--chat-template {quoted(prompt.chat_template)} "
    if template:
        click.echo(
            f"note: token ids do not name {prompt.chat_template}; give {template}to prepare too, so that the trained "
            "model is saved with it",
            err=True,
        )
    show_end(out, then=f"treepack prepare {quoted(out)} {template}{rewarded}--out DATA")


def _check_engine(engine: EngineOptions) -> None:
    """Refuse a model for this process that cannot be loaded, before prompts are read and torch is imported.

    Raises:
        TreepackError: the model or device does not exist, or torch is not installed.
    """
    from treepack.model.accept.vocabulary import find_config
    from treepack.train.input_checks import require_torch

    if not engine.is_server:
        check_device(engine.device)
        find_config(engine.engine)
        require_torch("a model in this process")


def _tokenizer(name: str | None, engine: EngineOptions) -> Any:
    """Return the tokenizer, None if no option names one and the model has none.

    Raises:
        TreepackError: it cannot be loaded, or the model in this process has another one.
    """
    from treepack.errors import TreepackError
    from treepack.tokenise.encoder import Encoder
    from treepack.tokenise.tokenization import read_tokenizer

    given = None if name is None else read_tokenizer(name)
    # A config file and a server have no tokenizer that could be read here; `connect` asks the server for ids.
    if engine.is_server or engine.engine.endswith(".json") or name == engine.engine:
        return given
    try:
        own = read_tokenizer(engine.engine)
    except TreepackError:
        return given  # token ids need no tokenizer, and text is refused later if there is none
    if given is not None and Encoder(given).encode(_SAMPLE_TEXT).tolist() != Encoder(own).encode(_SAMPLE_TEXT).tolist():
        raise TreepackError(f"{name}: is another tokenizer than that of {engine.engine}; leave out --tokenizer")
    return own if given is None else given


def _queries(path: AnyPath, prompt: PromptOptions, world: WorldOptions, tokenizer: Any, sampler: str) -> QueryFile:
    """Read the queries, and refuse a sampler that does not suit them.

    Raises:
        TreepackError: bad input, or nothing to sample.
        UsageError: options that the kind of PROMPTS does not have.
    """
    from treepack.errors import TreepackError
    from treepack.ingest.options import BuildOptions
    from treepack.rollout.prompts import PromptReader
    from treepack.rollout.queries import PREFIXES, PROMPTS, QuerySources, read_queries
    from treepack.tokenise.template.rendering import read_template

    template = None if prompt.chat_template is None else read_template(prompt.chat_template)
    tools = BuildOptions(tools=prompt.tools).tool_schemas()
    sources = QuerySources(
        prompts=prompt.prompts,
        trie=prompt.trie,
        reader=PromptReader(tokenizer, template, tools),
        step=prompt.step,
        has_environment=world.environment is not None,
    )
    queries = read_queries(path, sources)
    if sampler == "prefixes" and queries.kind == PROMPTS:
        raise TreepackError(
            f"{path}: has plain prompts, and --sampler prefixes continues what treepack allocate, augment or select "
            "writes; give --sampler independent"
        )
    if sampler == "treepo" and queries.kind == PREFIXES:
        raise TreepackError(f"{path}: has prefixes to continue, each one alone; give --sampler prefixes")
    if not queries.queries:
        raise TreepackError(f"{path}: asks for no rollout, because all its numbers are 0; allocate a larger budget")
    if is_given("width") and all(query.count is not None for query in queries.queries):
        raise click.UsageError(f"{path} has the numbers of rollouts; leave out --width")
    return queries


def _start(world: WorldOptions, function: Any, tokenizer: Any, sampling: Sampling) -> StartEpisode:
    """Return the function that starts the episode of a query; `function` is the environment or the reward."""
    from treepack.rollout.environment import start_episode
    from treepack.rollout.rewards import single_turn
    from treepack.tokenise.tokenization import load_tokenizer

    if world.environment is not None:
        # An environment encodes its messages, for which it needs all of transformers' tokenizer.
        tokenizer = None if tokenizer is None else load_tokenizer(tokenizer.name_or_path)

        async def in_environment(query: Query) -> tuple[Int32, Episode]:
            return await start_episode(function, query, tokenizer, stop_token_ids=sampling.stop_token_ids)

        return in_environment

    async def with_reward(query: Query) -> tuple[Int32, Episode]:
        return query.prompt, single_turn(function, query, tokenizer)

    return with_reward


def _answer(pattern: str, tokenizer: Any) -> Any:
    from treepack.errors import TreepackError
    from treepack.rollout.answers import answer_test

    if tokenizer is None:
        raise TreepackError("--answer is searched in text; give the model's --tokenizer")
    return answer_test(pattern, tokenizer)


def _with_stop_tokens(sampling: Sampling, engine: EngineOptions, tokenizer: Any) -> Sampling:
    """Return `sampling` with the stop tokens of the model or the tokenizer, if no option names any.

    Raises:
        TreepackError: they are not known.
    """
    from treepack.errors import TreepackError

    if sampling.stop_token_ids:
        return sampling
    if engine.is_server:
        # The server ends a response with its model's own tokens too, so none may be known here.
        end = getattr(tokenizer, "eos_token_id", None)
        return sampling if end is None else replace(sampling, stop_token_ids=(end,))
    from treepack.rollout.in_process.local import default_stop_tokens

    found = default_stop_tokens(engine.engine)
    if not found:
        raise TreepackError(f"{engine.engine}: its config names no token that ends a response; give --stop-token-id")
    return replace(sampling, stop_token_ids=found)


async def _open(options: EngineOptions, sampling: Sampling, tokenizer: Any) -> tuple[Engine, str]:
    """Return the engine, and the name of its model.

    Raises:
        TreepackError: the server or the model cannot be used.
    """
    if options.is_server:
        from treepack.rollout.servers.server import connect

        server = await connect(
            options.engine,
            sampling,
            model=options.model,
            api_key=_api_key(options.api_key_env),
            sample_text=_sample_text(tokenizer),
            seeded=not options.unseeded,
            keep_routes=options.keep_routes,
            route_layers=options.route_layers,
        )
        return server, server.found.model or options.engine
    import torch

    from treepack.rollout.in_process.local import load_engine
    from treepack.train.ranks import find_device, find_dtype

    device = find_device(options.device)
    dtype = torch.bfloat16 if find_dtype(options.dtype, device) == "bf16" else torch.float32
    return load_engine(options.engine, sampling, dtype=dtype, device=device), options.engine


def _api_key(name: str | None) -> str | None:
    from treepack.errors import TreepackError

    if name is None:
        return None
    if not os.environ.get(name):
        raise TreepackError(f"--api-key-env {name}: this environment variable is not set; export it")
    return os.environ[name]


def _sample_text(tokenizer: Any) -> SampleText | None:
    from treepack.rollout.servers.server import SampleText
    from treepack.tokenise.encoder import Encoder

    if tokenizer is None:
        return None
    return SampleText(_SAMPLE_TEXT, Encoder(tokenizer).encode(_SAMPLE_TEXT).tolist())


def _figures(summary: RolloutSummary, num_unused: int) -> dict[str, Any]:
    return {**asdict(summary), "saved": summary.saved, "num_unused": num_unused}


def _show(summary: RolloutSummary, num_unused: int, *, independent: bool, is_server: bool) -> None:
    """Print the figures; independent rollouts share no decoded token, so some have no meaning there."""
    rollouts, decoded = summary.num_rollouts, summary.tokens_decoded
    rows: dict[str, Any] = {"queries": summary.num_queries}
    if num_unused:
        rows["rows that ask for no rollout"] = num_unused
    if summary.num_before:
        rows["queries in the file before"] = summary.num_before
    if summary.num_removed:
        rows["lines of an incomplete tree, removed"] = summary.num_removed
    rows["rollouts"] = rollouts
    for reason, count in summary.finished.items():
        rows[f"ended by {reason}"] = f"{count:,}, {percent(count / rollouts)}"
    if summary.num_fallback:
        rows["added by a fallback"] = f"{summary.num_fallback:,}, {percent(summary.num_fallback / rollouts)}"
    rows["tokens decoded"] = decoded
    if summary.length is not None and summary.saved is not None:
        if not independent:
            rows["tokens decoded per rollout"] = decoded / rollouts
        rows |= _mean_rows("tokens of a rollout", summary.length)
        if not independent:
            rows["saved against independent sampling, estimated"] = percent(summary.saved)
    rows |= {"requests": summary.requests, "tokens of their prompts": summary.tokens_prefilled}
    if summary.tokens_cached is not None and (is_server or not independent):
        rows["in the engine's cache"] = percent(summary.tokens_cached / max(1, summary.tokens_prefilled))
    if summary.reward is not None:
        rows |= _mean_rows("pass rate" if summary.is_pass_rate else "reward", summary.reward)
    show({**rows, "seconds": summary.seconds})


def _mean_rows(name: str, means: RolloutMeans) -> dict[str, float]:
    """Return a row for the estimate, and rows for biased means if they are others."""
    rows = {f"mean {name}": means.before_fallback}
    # Without forks after the prompt all three are one number, up to rounding.
    if not math.isclose(means.all_leaves, means.before_fallback):
        rows[f"mean {name}, with fallback leaves (biased)"] = means.all_leaves
    if not math.isclose(means.unweighted, means.before_fallback):
        rows[f"mean {name}, unweighted (biased)"] = means.unweighted
    return rows
