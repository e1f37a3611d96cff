"""Options of reading: how raw rollouts become tokenised trajectories, and a trie.

This file imports no numerical library, so that the command line can take its options from here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treepack.errors import TreepackError
from treepack.files.input_files.limits import MAX_RECORD_SIZE
from treepack.ingest import column_map
from treepack.option_fields import check_options, option

if TYPE_CHECKING:
    from treepack.tokenise.template.rendering import TemplateFile

_EXPANSIONS = ("trajectory", "turns")
SHARES = ("all", "group", "none")
ROUTE_CONFLICTS = ("split", "first")
_CONTROL_TOKENS = ("keep", "text", "skip")
_TRUNCATED = ("keep", "drop")
_FAILED = ("drop", "keep")
_MIN_RECORD_SIZE = 1 << 20  # a lower limit would be below the blocks in which files are read


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Options of building a trie from rollouts: the options of `treepack build-trie`.

    Raises:
        TreepackError: a value that an option does not take.
    """

    format: str = option(
        "auto", "Format of the inputs, as treepack formats lists them; by default it is recognised by content."
    )
    # Text as in the command, the path of a JSON file, or an object with the same keys.
    columns: column_map.Given | None = option(
        None,
        "Where the parts of a rollout are in records of another layout, for example "
        "question=ask,answer=tries[].text,reward=tries[].ok; keys and paths are in docs/inputs.md.",
    )
    tokenizer: str | None = option(None, "Hugging Face tokenizer whose chat template renders conversations.")
    chat_template: str | None = option(
        None,
        "File with a chat template in Jinja, which replaces the template of the tokenizer; for token ids, the template "
        "of their prompts, which the trained model is saved with.",
    )
    # The schemas, or the path of a JSON file with them.
    tools: list[dict[str, Any]] | str | None = option(
        None, "JSON list of tool schemas for conversations that have none."
    )
    expand: str = option(
        "trajectory",
        "One sample per conversation, or one per assistant turn with the prompt rendered as it was then.",
        choices=_EXPANSIONS,
    )
    per_path: bool = option(
        False,
        "With --expand turns: a turn on several paths of a search tree becomes one sample for each path.",
    )
    # "all" shares within a training step; "none" makes every trajectory a separate tree, and no command offers it.
    share: str = option("all", "Share prefixes between all trajectories, or only inside a group.", choices=SHARES)
    reward_key: str | None = option(None, "Key of the reward, if the reward is an object.")
    normalize_ids: bool = option(
        False,
        "Number tool call ids, UUIDs and times of conversations, so that random ones do not split prefixes.",
    )
    train_all: bool = option(False, "Train every token of token records that have no mask.")
    shapes: bool = False  # also accept inputs that have lengths but no tokens; for statistics only
    control_tokens: str = option(
        "keep",
        "Special tokens that messages spell out: keep them as an engine does, tokenise them as ordinary text, or skip "
        "the conversation.",
        choices=_CONTROL_TOKENS,
    )
    truncated: str = option(
        "keep",
        "Rollouts whose last answer was cut: keep trains them without an end token, drop masks their loss and keeps "
        "their reward in the baseline of the group.",
        choices=_TRUNCATED,
    )
    failed: str = option(
        "drop",
        "Rollouts that failed because their environment or harness broke: drop leaves them out of training and groups, "
        "and counts them by cause; keep reads them as the others.",
        choices=_FAILED,
    )
    strict: bool = option(False, "Refuse the first rollout that would be skipped.")
    skip_bad: bool = option(False, "Skip and count damaged records and files, which are refused otherwise.")
    max_record_size: int = option(
        MAX_RECORD_SIZE,
        "Maximum size of a line, and of a file that is read as a whole, decompressed; suffixes K, M and G.",
    )
    # Each process takes about 0.6 s to start.
    workers: int = option(
        1,
        "Processes that read, tokenise, sort and write; the result is the same. They start if there are at least 32 MB "
        "of token ids, or any text to tokenise.",
        minimum=1,
    )
    # Tokens and columns are in memory, and routes in files if they are large.
    keep_routes: bool = option(
        False, "Keep the experts that a mixture's routers chose at sampling; train and logprobs then use the same ones."
    )
    route_conflicts: str = option(
        "split",
        "If rollouts recorded different experts for a shared prefix: split it, which is exact, or share it with the "
        "first experts.",
        choices=ROUTE_CONFLICTS,
    )

    def __post_init__(self) -> None:
        """Refuse values that make no sense, naming the option."""
        check_options(self)
        if self.per_path and self.expand != "turns":
            raise TreepackError("per_path is for one sample per turn; set expand to turns")
        if self.max_record_size < _MIN_RECORD_SIZE:
            raise TreepackError(
                f"max_record_size is {self.max_record_size}; expected at least {_MIN_RECORD_SIZE} bytes"
            )
        if not self.keep_routes and self.route_conflicts != "split":
            raise TreepackError("route_conflicts is about kept routes; give keep_routes too")
        if self.strict and self.skip_bad:
            raise TreepackError("strict and skip_bad exclude each other; give one of them")
        if self.columns is not None and self.format not in ("auto", "columns"):
            raise TreepackError(
                f"columns maps records of no known format, and format is {self.format}; give one of them"
            )
        self.column_map()
        if isinstance(self.tools, list) and not all(isinstance(tool, dict) for tool in self.tools):
            raise TreepackError("tools has an entry that is no object; expected a list of tool schemas")

    def tool_schemas(self) -> list[dict[str, Any]] | None:
        """Return the tool schemas, read from their file if `tools` is a path.

        Raises:
            TreepackError: the file cannot be read or is not a JSON list of objects.
        """
        if not isinstance(self.tools, str):
            return self.tools
        try:
            tools = json.loads(Path(self.tools).read_text(encoding="utf-8"))
            # Templates print them, and manifests record them: no NaN, and no half of a surrogate pair.
            json.dumps(tools, ensure_ascii=False, allow_nan=False).encode()
        except OSError as error:
            raise TreepackError(f"{self.tools}: cannot be read ({error.strerror}); check the path") from error
        except (ValueError, RecursionError) as error:
            raise TreepackError(f"{self.tools}: is not JSON ({error}); expected a list of tool schemas") from error
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise TreepackError(f"{self.tools}: expected a JSON list of tool schemas")
        return tools

    def column_map(self) -> column_map.ColumnMap | None:
        """Return the map of `columns`, read from its file if it is a path, or None if none is given.

        Raises:
            TreepackError: the file cannot be read, or the map is not valid.
        """
        return None if self.columns is None else column_map.column_map(self.columns)

    def template_file(self) -> TemplateFile | None:
        """Return the chat template, read from its file, or None if none is given.

        Raises:
            TreepackError: the file cannot be read or is not valid Jinja.
        """
        from treepack.tokenise.template.rendering import read_template

        return None if self.chat_template is None else read_template(self.chat_template)

    def as_record(self) -> dict[str, Any]:
        """Return the options that change the result, as the manifest of a trie records them."""
        record: dict[str, Any] = {
            "expand": self.expand,
            "format": self.format,
            "share": self.share,
            "tools": self.tool_schemas(),
            "reward_key": self.reward_key,
            "train_all": self.train_all,
        }
        # Written only if set: tries that were built without these options keep their bytes.
        if (file := self.template_file()) is not None:
            record["chat_template"] = {"name": Path(file.path).name, "sha256": file.sha256}
        if self.columns is not None:
            record["columns"] = column_map.as_record(self.columns)
        if self.control_tokens != "keep":
            record["control_tokens"] = self.control_tokens
        if self.truncated != "keep":
            record["truncated"] = self.truncated
        if self.failed != "drop":
            record["failed"] = self.failed
        if self.keep_routes:
            record |= {"keep_routes": True, "route_conflicts": self.route_conflicts}
        return record | {name: True for name in ("normalize_ids", "per_path", "skip_bad") if getattr(self, name)}
