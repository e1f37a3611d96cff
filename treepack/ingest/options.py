"""Options of reading: how raw rollouts become tokenised trajectories, and a trie.

This file imports no numerical library, so that the command line can take its defaults from here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treepack.errors import TreepackError
from treepack.ingest import column_map

if TYPE_CHECKING:
    from treepack.ingest.template.rendering import TemplateFile

EXPANSIONS = ("trajectory", "turns")
SHARES = ("all", "group", "none")
ROUTE_CONFLICTS = ("split", "first")
CONTROL_TOKENS = ("keep", "text", "skip")
TRUNCATED = ("keep", "drop")
MAX_RECORD_SIZE = 1 << 30  # bytes of one record, decompressed; as Python values it takes about four times as much
MIN_RECORD_SIZE = 1 << 20  # a lower limit would be below the blocks in which files are read


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Options of building a trie from rollouts: the options of `treepack build-trie`.

    Raises:
        TreepackError: a value that an option does not take.
    """

    format: str = "auto"  # a name that `treepack formats` lists, or "auto" to recognise each file by its content
    # Paths to the parts of a rollout in records of a different layout: "KEY=PATH,...", the path of a JSON file, or an
    # object with the same keys; see docs/inputs.md.
    columns: column_map.Given | None = None
    tokenizer: str | None = None  # name or folder of the tokenizer whose chat template renders conversations
    chat_template: str | None = None  # path of a file with a chat template, which replaces that of the tokenizer
    # Tool schemas for conversations that have none, or the path of a JSON file with them.
    tools: list[dict[str, Any]] | str | None = None
    expand: str = "trajectory"  # "trajectory" for one sample per conversation, "turns" for one per assistant turn
    # With `expand` "turns", make a sample of a turn for each path of a search tree that has it, not one.
    per_path: bool = False
    # "all" shares prefixes between all trajectories of a training step, "group" only inside a group, "none" makes
    # every trajectory a tree of its own.
    share: str = "all"
    reward_key: str | None = None  # key of the reward, if the reward is an object
    # Number tool call ids, UUIDs and times of conversations, so that random ones share prefixes.
    normalize_ids: bool = False
    train_all: bool = False  # train every token of token records that have no mask
    shapes: bool = False  # also accept inputs that have lengths but no tokens; for statistics only
    strict: bool = False  # refuse the first rollout that would be skipped
    skip_bad: bool = False  # skip and count damaged records and files, which are refused otherwise
    # Maximum bytes of a line, and of a file that is read as a whole, decompressed.
    max_record_size: int = MAX_RECORD_SIZE
    # Special tokens that messages spell out: "keep" tokenises them as an engine does, "text" as ordinary text, and
    # "skip" skips the conversation.
    control_tokens: str = "keep"
    # Processes that read, tokenise, sort and write; the result is the same for any number. They start if there are at
    # least 32 MB of token ids, or any text to tokenise. Each takes about 0.6 s to start.
    workers: int = 1
    # Keep the experts that the routers of a mixture chose when the rollouts were sampled, for training with the same
    # ones. Tokens and columns are in memory, and routes in files if they are large.
    keep_routes: bool = False
    # Where trajectories share tokens with other experts: "split" does not share them, which is exact, and "first"
    # shares them with the experts of the first trajectory.
    route_conflicts: str = "split"
    # Rollouts whose last answer a limit or a filter cut: "keep" trains them, without an end token, and "drop" masks
    # their loss, while their reward counts in the baseline of their group.
    truncated: str = "keep"

    def __post_init__(self) -> None:
        """Refuse values that make no sense, naming the option."""
        choices = {"expand": EXPANSIONS, "share": SHARES, "control_tokens": CONTROL_TOKENS, "truncated": TRUNCATED}
        for name, known in {**choices, "route_conflicts": ROUTE_CONFLICTS}.items():
            if getattr(self, name) not in known:
                raise TreepackError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(known)}")
        if self.per_path and self.expand != "turns":
            raise TreepackError("per_path is for one sample per turn; set expand to 'turns' (--expand turns)")
        if self.max_record_size < MIN_RECORD_SIZE:
            raise TreepackError(f"max_record_size is {self.max_record_size}; expected at least {MIN_RECORD_SIZE} bytes")
        if self.workers < 1:
            raise TreepackError(f"workers is {self.workers}; expected at least 1")
        if not self.keep_routes and self.route_conflicts != "split":
            raise TreepackError("route_conflicts is about kept routes; set keep_routes (--keep-routes)")
        if self.strict and self.skip_bad:
            raise TreepackError("strict refuses what skip_bad skips; give one of them (--strict, --skip-bad)")
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
        """Return the map of `columns`, read from its file if it is a path; None if there is none.

        Raises:
            TreepackError: the file cannot be read, or the map is not valid.
        """
        return None if self.columns is None else column_map.column_map(self.columns)

    def template_file(self) -> TemplateFile | None:
        """Return the chat template, read from its file; None if there is none.

        Raises:
            TreepackError: the file cannot be read or is not valid Jinja.
        """
        from treepack.ingest.template.rendering import read_template

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
        if self.keep_routes:
            record |= {"keep_routes": True, "route_conflicts": self.route_conflicts}
        return record | {name: True for name in ("normalize_ids", "per_path", "skip_bad") if getattr(self, name)}
