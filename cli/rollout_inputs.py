"""Options of `treepack rollout` about everything outside of it: the engine, the prompts, environments and rewards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from treepack.train.options import TrainOptions

from .option_groups import field_options, option_group
from .paths import READ, TRIE
from .reading import TEMPLATE_OPTIONS

if TYPE_CHECKING:
    from treepack.files.remote.address import AnyPath


@dataclass(frozen=True)
class EngineOptions:
    """Options of the engine: of a server, or of a model in this process."""

    engine: str
    model: str | None
    api_key_env: str | None
    unseeded: bool
    keep_routes: bool
    route_layers: int | None
    dtype: str
    device: str

    def __post_init__(self) -> None:
        """Refuse options that need each other."""
        if self.keep_routes and not self.is_server:
            raise click.UsageError("--keep-routes reads the experts of a server; give its address as --engine")
        if self.route_layers is not None and not self.keep_routes:
            raise click.UsageError("--route-layers is about kept routes; give --keep-routes too")

    @property
    def is_server(self) -> bool:
        """True if the engine is the address of a server."""
        return self.engine.startswith(("http://", "https://"))


@dataclass(frozen=True)
class PromptOptions:
    """Options of the prompts: tokenizer, template, and the sources of groups that a table names."""

    prompts: tuple[AnyPath, ...]
    trie: AnyPath | None
    tokenizer: str | None
    chat_template: str | None
    tools: str | None
    step: int | None


@dataclass(frozen=True)
class WorldOptions:
    """Options of everything that reads the sampled tokens: the environment or the reward, and the answer."""

    environment: str | None
    reward: str | None
    answer: str | None

    def __post_init__(self) -> None:
        """Refuse options that exclude each other."""
        if self.environment and self.reward:
            raise click.UsageError("--environment gives the reward of a rollout; leave out --reward")

    @property
    def function(self) -> str | None:
        """Name of the environment or of the reward function."""
        return self.environment or self.reward


engine_options = option_group(
    "engine",
    [
        click.option(
            "--engine",
            required=True,
            metavar="URL|MODEL",
            help="Server of vLLM or SGLang (http://...), or a model for this process: directory, hub name or config "
            "file (random weights).",
        ),
        click.option("--model", metavar="NAME", help="Name of the model at the server, if it serves several."),
        click.option(
            "--api-key-env", metavar="NAME", help="Environment variable with the key that the server asks for."
        ),
        click.option(
            "--unseeded",
            is_flag=True,
            help="Send no seeds to a server: rollouts are not repeatable, and vLLM samples many requests faster.",
        ),
        click.option(
            "--keep-routes",
            is_flag=True,
            help="Keep the experts that the routers of a server's model choose; the server needs "
            "--enable-return-routed-experts.",
        ),
        click.option(
            "--route-layers",
            type=click.IntRange(min=1),
            metavar="N",
            help="With --keep-routes and SGLang: layers of the model, which SGLang does not send.",
        ),
        *field_options(
            TrainOptions,
            "dtype device",
            dtype={"help": "Of a model in this process; auto is bf16 on a GPU that has it."},
            device={"help": "Of a model in this process: cpu, cuda or cuda:N; auto is a GPU if there is one."},
        ),
    ],
    EngineOptions,
)
prompt_options = option_group(
    "prompt",
    [
        click.option(
            "--prompts",
            type=READ,
            multiple=True,
            help="File with the prompts that a table names by their groups, or with the parents of augmented queries. "
            "May be repeated.",
        ),
        click.option("--trie", type=TRIE, help="Trie with the rollouts that a table names."),
        click.option(
            "--tokenizer",
            metavar="NAME_OR_DIR",
            help="Tokenizer of the model, for prompts in text, rewards of text and --answer; default: that of MODEL.",
        ),
        *TEMPLATE_OPTIONS,
        click.option("--step", type=int, help="Training step of the rollouts, if PROMPTS has none."),
    ],
    PromptOptions,
)
world_options = option_group(
    "world",
    [
        click.option("--environment", metavar="MODULE:NAME", help="Environment of rollouts with several turns."),
        click.option("--reward", metavar="MODULE:NAME", help="Function that returns the reward of a response."),
        click.option(
            "--answer", metavar="REGEX|boxed", help="End a rollout whose text contains this; boxed: a closed \\boxed{}."
        ),
    ],
    WorldOptions,
)
