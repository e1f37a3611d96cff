"""Find the loops of a chat template over messages, and let them ask `tracking` for the iterations that must be run.

    {% for message in messages %}          {% for message, L in messages | _treepack_loop(0) %}
      ... loop.last ...              ->      ... L.last ...
    {% endfor %}                           {% endfor %}

Only loops at the top level of a template, or in an `if` there, are changed, and only if nothing in their body has a
state that `tracking` cannot see. A changed template prints the same text. Two more changes let a loop depend on less:

    loop.index0 > ns.last_user                  L.index0 | _treepack_compare("gt", ns, "last_user", False)
    (messages|length - 1) - loop.index0         L | _treepack_position     in a loop over messages[::-1]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from jinja2 import Environment, nodes
from jinja2.visitor import NodeTransformer

LOOP, REVERSED, COMPARE, POSITION = (f"_treepack_{name}" for name in ("loop", "reversed", "compare", "position"))
PREFIX = "_treepack"

# Statements that bring in other templates, and names, filters and attributes with a state or with random results.
_FOREIGN = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport, nodes.EvalContextModifier)
_STATEFUL_NAMES = frozenset({"cycler", "joiner", "lipsum", "self"})
_STATEFUL_FILTERS = frozenset({"random", "attr"})
_STATEFUL_ATTRIBUTES = frozenset({"changed"})
_CLOCK = "strftime_now"
_PROMPT = "add_generation_prompt"
_ORDERS = frozenset({"gt", "gteq", "lt", "lteq", "eq", "ne"})

_Kind = TypeVar("_Kind", bound=nodes.Node)


@dataclass(frozen=True, slots=True)
class _TemplateLoop:
    """Names of variables and attributes in the body of a loop, and in the macros that it may call."""

    names: frozenset[str]
    attributes: frozenset[str]

    @property
    def reads_prompt(self) -> bool:
        """Return True if an iteration may depend on whether the generation prompt is rendered."""
        return _PROMPT in self.names


def change_loops(tree: nodes.Template, environment: Environment) -> list[_TemplateLoop]:
    """Change the loops of `tree` in place; return a description of each changed one."""
    names = {name.name for name in tree.find_all(nodes.Name)}
    if (
        next(tree.find_all(_FOREIGN), None) is not None
        or names & _STATEFUL_NAMES
        or any(name.startswith(PREFIX) for name in names)
        or any(each.name in _STATEFUL_FILTERS or each.name.startswith(PREFIX) for each in tree.find_all(nodes.Filter))
        or _attributes(tree) & _STATEFUL_ATTRIBUTES
        or any(name.name == "loop" and name.ctx != "load" for name in tree.find_all(nodes.Name))
    ):
        return []
    macros: dict[str, list[nodes.Macro]] = {}
    for macro in tree.find_all(nodes.Macro):
        macros.setdefault(macro.name, []).append(macro)
    namespaces = _namespaces(tree)
    loops: list[_TemplateLoop] = []
    for loop in _top_loops(tree.body):
        description = _describe(loop, macros)
        if _is_suitable(loop, description):
            _change(loop, len(loops), namespaces, environment)
            loops.append(description)
    return loops


def _namespaces(tree: nodes.Template) -> set[str]:
    """Return the variables that are set to a new namespace."""
    return {
        each.target.name
        for each in tree.find_all(nodes.Assign)
        if isinstance(each.target, nodes.Name)
        and isinstance(each.node, nodes.Call)
        and isinstance(each.node.node, nodes.Name)
        and each.node.node.name == "namespace"
    }


def _top_loops(body: list[nodes.Node]) -> Iterator[nodes.For]:
    for node in body:
        if isinstance(node, nodes.For):
            yield node
        elif isinstance(node, nodes.If):
            for branch in (node.body, *(each.body for each in node.elif_), node.else_):
                yield from _top_loops(branch)


def _describe(loop: nodes.For, macros: dict[str, list[nodes.Macro]]) -> _TemplateLoop:
    names: set[str] = set()
    attributes: set[str] = set()
    parts: list[nodes.Node] = list(loop.body)
    while parts:
        part = parts.pop()
        new = {name.name for name in _all(part, nodes.Name)} - names
        names |= new
        attributes |= _attributes(part)
        parts += [macro for name in sorted(new) for macro in macros.get(name, [])]
    return _TemplateLoop(frozenset(names), frozenset(attributes))


def _all(node: nodes.Node, kind: type[_Kind]) -> Iterator[_Kind]:
    """Yield the nodes of a kind inside of `node`, and itself."""
    if isinstance(node, kind):
        yield node
    yield from node.find_all(kind)


def _attributes(node: nodes.Node) -> set[str]:
    """Return the names of attributes, and constant texts in brackets, which may be such names, inside of `node`."""
    names = {each.attr for each in node.find_all(nodes.Getattr)}
    names |= {each.value for each in node.find_all(nodes.Const) if isinstance(each.value, str)}
    return names


def _is_suitable(loop: nodes.For, description: _TemplateLoop) -> bool:
    if loop.else_ or loop.test or loop.recursive or not isinstance(loop.target, nodes.Name):
        return False
    if _CLOCK in description.names or (isinstance(loop.iter, nodes.Name) and loop.iter.name == "tools"):
        return False
    # A macro of the body, or the filter of a loop in it, may see another variable `loop` than its text suggests.
    inner = [macro for part in loop.body for macro in _all(part, nodes.Macro)]
    tests = [each.test for part in loop.body for each in _all(part, nodes.For) if each.test is not None]
    return not inner and not any(name.name == "loop" for test in tests for name in _all(test, nodes.Name))


def _change(loop: nodes.For, number: int, namespaces: set[str], environment: Environment) -> None:
    assert isinstance(loop.target, nodes.Name)
    variable = f"{PREFIX}_{number}"
    for part in loop.body:
        for name in _outer_loop(part):
            name.name = variable
    is_reversed, iterated = _order(loop.iter)
    if is_reversed and any(
        name.name == iterated.name and name.ctx != "load" for part in loop.body for name in _all(part, nodes.Name)
    ):
        is_reversed, iterated = False, loop.iter
    transformer = _PositionTransformer(iterated, variable) if is_reversed else _CompareTransformer(namespaces)
    loop.body = [transformer.visit(part) for part in loop.body]
    loop.iter = _filter(iterated, REVERSED if is_reversed else LOOP, [nodes.Const(number)])
    loop.target = nodes.Tuple([loop.target, nodes.Name(variable, "store")], "store")
    loop.set_environment(environment)
    loop.set_lineno(loop.lineno)


def _order(iterated: nodes.Node) -> tuple[bool, Any]:
    """Return whether a loop over `iterated` goes backwards, and the list: messages[::-1] -> True, messages."""
    if isinstance(iterated, nodes.Getitem) and isinstance(part := iterated.arg, nodes.Slice):
        step = part.step
        is_back = isinstance(step, nodes.Neg) and isinstance(step.node, nodes.Const) and step.node.value == 1
        if is_back and part.start is None and part.stop is None and isinstance(iterated.node, nodes.Name):
            return True, iterated.node
    return False, iterated


def _outer_loop(node: nodes.Node) -> Iterator[nodes.Name]:
    """Yield the names `loop` in `node` that mean the loop around it, not a loop inside of it."""
    if isinstance(node, nodes.Name):
        if node.name == "loop":
            yield node
    elif isinstance(node, nodes.For):
        for part in (node.iter, *node.else_):
            yield from _outer_loop(part)
    else:
        for child in node.iter_child_nodes():
            yield from _outer_loop(child)


def _filter(value: nodes.Expr, name: str, arguments: list[nodes.Expr]) -> nodes.Filter:
    """Return `value | name(arguments)`, which the sandbox runs faster than a call of a function."""
    return nodes.Filter(value, name, arguments, [], None, None)


class _CompareTransformer(NodeTransformer):
    """Change comparisons with an attribute of a namespace to filters."""

    def __init__(self, namespaces: set[str]) -> None:
        self._namespaces = namespaces  # names of variables

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802 (of the base class)
        """Change `expression > namespace.attribute`, and with the sides exchanged."""
        self.generic_visit(node)
        if len(node.ops) != 1 or node.ops[0].op not in _ORDERS:
            return node
        left, right = node.expr, node.ops[0].expr
        order = nodes.Const(node.ops[0].op)
        for side, other, is_left in ((right, left, False), (left, right, True)):
            if not isinstance(side, nodes.Getattr) or not isinstance(side.node, nodes.Name):
                continue
            if side.node.name in self._namespaces:
                return _filter(other, COMPARE, [order, side.node, nodes.Const(side.attr), nodes.Const(is_left)])
        return node


class _PositionTransformer(NodeTransformer):
    """Change the position of a message, computed from the number of messages and of iterations, to a filter."""

    def __init__(self, iterated: nodes.Expr, variable: str) -> None:
        assert isinstance(iterated, nodes.Name)
        self._iterated, self._variable = iterated.name, variable

    def visit_Sub(self, node: nodes.Sub) -> nodes.Node:  # noqa: N802 (of the base class)
        """Change `(messages|length - 1) - loop.index0` and equal expressions."""
        # n - 1 - index0, n - index0 - 1, n - index: the terms after the length, in any order.
        terms: list[nodes.Expr] = []
        first: nodes.Expr = node
        while isinstance(first, nodes.Sub):
            terms.append(first.right)
            first = first.left
        is_length = (
            isinstance(first, nodes.Filter)
            and first.name in ("length", "count")
            and isinstance(first.node, nodes.Name)
            and first.node.name == self._iterated
        )
        words = sorted(self._word(term) for term in terms)
        if is_length and words in (["1", "index0"], ["index"]):
            return _filter(nodes.Name(self._variable, "load"), POSITION, [])
        return self.generic_visit(node)

    def _word(self, term: nodes.Expr) -> str:
        if isinstance(term, nodes.Const) and type(term.value) is int:
            return str(term.value)
        if isinstance(term, nodes.Getattr) and isinstance(term.node, nodes.Name) and term.node.name == self._variable:
            return term.attr
        return ""
