"""Settings of a conversation: the schemas of its tools, and the variables of its chat template."""

from __future__ import annotations

import json
import re
from typing import Any

from treepack.errors import TreepackError
from treepack.ingest.readers.fields.unread import is_empty
from treepack.ingest.readers.fields.values import JsonObject, fault_in_json, is_messages, object_or_empty, quoted, shown
from treepack.ingest.readers.messages.tool_calls import opened_json

# Names of the tool schemas of a record, and of the parameters of a schema.
TOOLS = frozenset(
    "tools functions tool_definitions tool_schemas available_tools tool_defs tools_schema function_schemas "
    "function_definitions available_functions".split()
)
_PARAMETERS = ("input_schema", "inputSchema", "parameters_json_schema", "parametersJsonSchema", "json_schema", "schema")
_WRAPPERS = ("function_declarations", "functionDeclarations", "toolSpec")
# Variables that `chat_template` passes to the template itself, or that would change its mode.
_RESERVED = frozenset(
    "messages conversations tools chat_template add_generation_prompt continue_final_message "
    "return_assistant_tokens_mask".split()
)


def tools_of(value: JsonObject) -> Any:
    """Return the tool schemas of a record under the first of `TOOLS` that is not empty, or None if all are."""
    return next((value[name] for name in sorted(TOOLS, reverse=True) if not is_empty(value.get(name))), None)


def normalise_tools(tools: Any, *, source: str) -> list[JsonObject] | None:
    """Return tool schemas in the nested form, from a list, an object by name, or JSON text; None if it is empty.

    Raises:
        TreepackError: `tools` is something else.
    """
    tools = _parsed(tools, source)
    if tools is None:
        return None
    if isinstance(tools, dict):
        # One schema, or schemas by their names: {"f": {"description": ..}} -> [{"name": "f", "description": ..}]
        is_one = "name" in tools or "function" in tools
        tools = [tools] if is_one else [{"name": name, **object_or_empty(tool)} for name, tool in tools.items()]
    if isinstance(tools, list):
        tools = [each for tool in tools for each in _declared(_parsed(tool, source))]  # a column of texts
    if not is_messages(tools):
        raise TreepackError(f"{source}: tools is {shown(tools)}; expected a list of schemas or one as JSON text")
    if (fault := fault_in_json(tools)) is not None:
        raise TreepackError(f"{source}: tools is {fault}; expected schemas in JSON")
    return [_nest(tool) for tool in tools] or None


def _parsed(tools: Any, source: str) -> Any:
    if not isinstance(tools, str):
        return tools
    try:
        return json.loads(tools) if tools.strip() else None
    except (ValueError, RecursionError) as error:
        if all(word.isidentifier() for word in re.split(r"[,;\s]+", tools.strip())):
            raise TreepackError(
                f"{source}: tools has the name {quoted(tools)} without a schema; write the schemas, or leave the field "
                "out with --columns ignore=tools"
            ) from None
        raise TreepackError(f"{source}: tools is not JSON ({error}); expected a list of schemas") from None


def _declared(tool: Any) -> list[Any]:
    """Return the schemas in one element of a list: itself, or the schemas in Gemini's and Bedrock's wrappers."""
    inner = next((tool[name] for name in _WRAPPERS if tool.get(name)), None) if isinstance(tool, dict) else None
    return [tool] if inner is None else inner if isinstance(inner, list) else [inner]


def _nest(tool: JsonObject) -> JsonObject:
    """Return a function `tool` in the nested form; another tool, such as the search of a server, stays as it is."""
    if isinstance(function := opened_json(tool.get("function")), dict):
        return tool | {"function": _with_parameters(function)}
    # {"name": "f", "input_schema": S} -> {"type": "function", "function": {"name": "f", "parameters": S}}
    if "function" in tool or not isinstance(tool.get("name"), str) or tool.get("type", "function") != "function":
        return tool
    renamed = {"parameters" if key in _PARAMETERS else key: value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": _with_parameters(renamed)}


def _with_parameters(function: JsonObject) -> JsonObject:
    """Return a function whose parameters are an object: JSON text is parsed, and Bedrock's {"json": S} is S."""
    parameters = opened_json(function.get("parameters"))
    if isinstance(parameters, dict) and parameters.keys() == {"json"}:
        parameters = parameters["json"]
    return function | {"parameters": parameters} if isinstance(parameters, dict) else function


def normalise_template_kwargs(kwargs: Any, *, source: str) -> JsonObject | None:
    """Return the variables that a conversation sets for its chat template; None if it sets none.

    Raises:
        TreepackError: they are not an object in JSON, or include a variable that treepack sets.
    """
    kwargs = opened_json(kwargs)
    if kwargs is None or kwargs == "":
        return None
    if not isinstance(kwargs, dict):
        raise TreepackError(
            f"{source}: chat_template_kwargs is {shown(kwargs)}; expected an object of the template's variables"
        )
    if reserved := sorted(_RESERVED.intersection(kwargs)):
        raise TreepackError(f"{source}: chat_template_kwargs sets {reserved[0]}, which treepack sets; remove it there")
    if (fault := fault_in_json(kwargs)) is not None:
        raise TreepackError(f"{source}: chat_template_kwargs is {fault}; expected an object in JSON")
    return kwargs or None
