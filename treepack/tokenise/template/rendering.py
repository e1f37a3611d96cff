"""Run a chat template in the sandbox, and turn everything that it raises into two kinds of errors.

    bad syntax of the template          TreepackError, refused at once
    messages that it cannot render      UnfaithfulError, so that this conversation is skipped and counted

A template is foreign code, which can raise anything.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treepack.errors import TreepackError

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
ANOTHER_TEMPLATE = "use another template (--chat-template FILE; docs/templates.md compares many)"  # the usual remedy
_REFUSED = "the chat template refuses the messages"
BAD_MARKS = "the chat template puts no usable generation marks"

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None
Span = tuple[int, int]


class UnfaithfulError(TreepackError):
    """A conversation that a chat template cannot render faithfully; it is skipped and counted.

    `reason` is the category to count, without names and numbers. The message is the sentence about this conversation.
    """

    def __init__(self, sentence: str, reason: str) -> None:
        """Keep the sentence and its category."""
        super().__init__(sentence)
        self.reason = reason

    def __reduce__(self) -> tuple[type[UnfaithfulError], tuple[str, str]]:
        """Let the error come back from a worker with both arguments."""
        return UnfaithfulError, (str(self), self.reason)


@dataclass(frozen=True, slots=True)
class TemplateFile:
    """A chat template that was read from a file: its path, for errors, and its text."""

    path: str
    text: str

    @property
    def sha256(self) -> str:
        """The sha256 of the text in hex."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class TemplateSetting:
    """Inputs of a template besides the messages, and the `source` that errors name."""

    source: str
    template: str
    tools: Tools
    variables: dict[str, Any]


def is_json_object(text: str) -> bool:
    """Return True if `text` is an object in JSON, as the arguments of a call are."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def read_template(path: str) -> TemplateFile:
    """Read a chat template from a file.

    Raises:
        TreepackError: the file cannot be read, or its text is not a template.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise TreepackError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise TreepackError(f"{path}: is not UTF-8 ({error.reason}); give a chat template in Jinja") from error
    if not text.strip():
        raise TreepackError(f"{path}: is empty; give a chat template in Jinja")
    check_syntax(text, path)
    return TemplateFile(path, text)


def templates_in(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template of a tokenizer's folder, or several by name; files count before its `config`."""
    paths = {"default": folder / "chat_template.jinja"} if (folder / "chat_template.jinja").is_file() else {}
    paths |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    texts = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    if texts:
        return texts["default"] if texts.keys() == {"default"} else texts
    given: Any = config.get("chat_template")
    return {each["name"]: each["template"] for each in given} if isinstance(given, list) else given


def check_syntax(template: str, name: str) -> None:
    """Refuse a `template` that is not Jinja or does not end; `name` is its file or its tokenizer.

    Raises:
        TreepackError: with the line and the reason.
    """
    from jinja2 import TemplateSyntaxError

    from treepack.tokenise.template.sandbox import EndlessTemplateError, compiled

    try:
        compiled(template).render([])
    except TemplateSyntaxError as error:
        reason = str(error.message).partition("\n")[0]
        raise TreepackError(
            f"{name}: the chat template is not valid Jinja (line {error.lineno}: {reason}); "
            "fix it, or give another one (--chat-template FILE)"
        ) from error
    except EndlessTemplateError as error:
        raise _endless(name, error) from error
    except Exception:  # it is valid Jinja; without messages a template may raise anything
        return


def _endless(where: str, error: Exception) -> TreepackError:
    return TreepackError(f"{where}: the chat template does not end ({error}); give another one (--chat-template FILE)")


def render(messages: list[Message], setting: TemplateSetting, *, prompt: bool = False) -> str:
    """Render `messages`, with `prompt` also the generation prompt.

    Raises:
        UnfaithfulError: the template raises anything.
    """
    return render_with_marks(messages, setting, prompt=prompt)[0]


def render_with_marks(
    messages: list[Message], setting: TemplateSetting, *, prompt: bool = False
) -> tuple[str, list[Span]]:
    """Render as `render` does; return the text and the spans of its generation marks.

    Raises:
        UnfaithfulError: the template raises anything.
        TreepackError: it does not end.
    """
    # Imported here, because importing jinja2 takes a while and token ids need no template.
    from jinja2 import TemplateError

    from treepack.tokenise.template.sandbox import EndlessTemplateError, compiled, plain_message

    try:
        template, plain = compiled(setting.template), [plain_message(message) for message in messages]
        return template.render(plain, tools=setting.tools, prompt=prompt, variables=setting.variables)
    except EndlessTemplateError as error:  # each further conversation would take as long
        raise _endless(setting.source, error) from error
    except Exception as error:  # a template is foreign code, which can raise anything
        message = str(error).strip().partition("\n")[0]
        # raise_exception('no system') of a template -> "no system"; 1 // 0 -> "ZeroDivisionError: integer division ..."
        kind = "" if isinstance(error, TemplateError) and message else type(error).__name__
        reason = ": ".join(part for part in (kind, message) if part)
        raise UnfaithfulError(
            f"{setting.source}: {_REFUSED} ({reason}); fix them or {ANOTHER_TEMPLATE}",
            _REFUSED,
        ) from error
