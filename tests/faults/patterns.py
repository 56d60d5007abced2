"""Changes of Python code that do not depend on the names of variables or on formatting.

A pattern is an expression, or statements in a row, in Python, and begins with no wildcard. In it

    _  _1  _2 ...     stand for any expression, any statement, or any name of an attribute, an argument or a keyword,
    *_  *_1 ...       for any number of expressions or statements in a row,
    **_  **_1 ...     for any number of keyword arguments of a call.

A numbered one stands for the same thing wherever it is repeated, also in the text that is put in the pattern's place:
of `a.sum() / n`, the pattern `_1 / _2` and the replacement `_2 / _1` make `n / a.sum()`.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_WILDCARD = re.compile(r"_\d*")
_ANY, _REST = "_", "_rest"  # no numbered wildcard has the latter's name
Values = Mapping[str, Any]  # what numbered wildcards stand for


class NotOnce(ValueError):
    """A pattern matches nothing, or several places."""


def parse(text: str) -> list[ast.AST]:
    """One expression, or statements, of a pattern or a replacement."""
    statements = ast.parse(text).body
    return [statements[0].value] if len(statements) == 1 and isinstance(statements[0], ast.Expr) else [*statements]


def locate(path: str, root: Path) -> tuple[Path, list[str]]:
    """The file of a dotted path below `root`, and the names inside it: data.order.Permutation.__call__ ->
    data/order.py, ["Permutation", "__call__"].

    Raises:
        FileNotFoundError: no part of it is a module.
    """
    names = path.split(".")
    for count in range(len(names), 0, -1):
        module = root.joinpath(*names[:count])
        for file in (module.with_suffix(".py"), module / "__init__.py"):
            if file.is_file():
                return file, names[count:]
    raise FileNotFoundError(f"{path} is in no module")


def replace_match(source: str, names: Sequence[str], find: str, put: str) -> str:
    """Python code with the one match of `find` replaced by `put`. The function or class that is searched is written
    anew, without its comments; all other lines stay.

    Args:
        names: Of this function or class, from the outside inwards; none: all functions, classes and assignments of the
            code are searched.

    Raises:
        NotOnce: `find` does not match exactly one place.
    """
    module = ast.parse(source)
    scopes: list[Any] = [module] if names else module.body
    for name in names:
        scopes = [node for scope in scopes for node in scope.body if getattr(node, "name", None) == name]
    pattern, new = parse(find), parse(put)
    if isinstance(pattern[0], ast.stmt) != isinstance(new[0], ast.stmt):  # such as a call by `pass`
        pattern, new = ast.parse(find).body, ast.parse(put).body
    matches = [(scope, *match) for scope in scopes for match in _find_places(scope, pattern)]
    if len(matches) != 1:
        raise NotOnce(f"its pattern matches {len(matches)} times")
    scope, node, field, begin, end, values = matches[0]
    if isinstance(old := getattr(node, field), list):
        old[begin:end] = _fill(new, values)
    else:
        setattr(node, field, _fill(new, values)[0])
    first = min(each.lineno for each in (scope, *getattr(scope, "decorator_list", ()))) - 1
    depth, indented = scope.col_offset // 4, scope
    for _ in range(depth):
        indented = ast.If(ast.Constant(True), [indented], [])
    text = ast.unparse(ast.fix_missing_locations(indented)).split("\n", depth)[-1].strip("\n")  # without the ifs
    lines = source.splitlines(keepends=True)
    return "".join([*lines[:first], text, "\n", *lines[scope.end_lineno :]])


def _find_places(scope: ast.AST, pattern: list[Any]) -> Iterator[tuple[ast.AST, str, int, int, Values]]:
    """Where a pattern matches: a node, its field, the part of this field if it is a list, and the wildcards' values."""
    for node in ast.walk(scope):
        for field, content in ast.iter_fields(node):
            items = content if isinstance(content, list) else [content]
            for begin, item in enumerate(items):
                if type(item) is not type(pattern[0]):  # most, and this is quick
                    continue
                matches = _match_in_order([*pattern, ast.Starred(ast.Name(_REST))], items[begin:], {})
                for values in itertools.islice(matches, 1):
                    yield node, field, begin, len(items) - len(values[_REST]), values


def _match(pattern: Any, tree: Any, values: Values) -> Iterator[Values]:
    """The ways in which a pattern matches a tree, both nodes, lists, names or constants."""
    if isinstance(pattern, list):
        if isinstance(tree, list):
            yield from _match_in_order(pattern, tree, values)
    elif name := _wildcard(pattern):
        kind = ast.expr if isinstance(pattern, ast.Name) else ast.stmt if isinstance(pattern, ast.AST) else str
        if isinstance(tree, kind):
            yield from _bind(name, tree, values)
    elif type(pattern) is type(tree):
        if isinstance(pattern, ast.Constant):
            yield from [values] if (type(pattern.value), pattern.value) == (type(tree.value), tree.value) else []
        elif isinstance(pattern, ast.AST):
            yield from _match_in_order(_fields(pattern), _fields(tree), values)
        elif pattern == tree:
            yield values


def _match_in_order(patterns: Sequence[Any], trees: Sequence[Any], values: Values) -> Iterator[Values]:
    if not patterns:
        yield from [values] if not trees else []
    elif name := _wildcard_of_several(patterns[0]):
        for count in range(len(trees) + 1):
            for bound in _bind(name, list(trees[:count]), values):
                yield from _match_in_order(patterns[1:], trees[count:], bound)
    elif trees:
        for bound in _match(patterns[0], trees[0], values):
            yield from _match_in_order(patterns[1:], trees[1:], bound)


def _bind(name: str, tree: Any, values: Values) -> Iterator[Values]:
    if name == _ANY:
        yield values
    elif name not in values or _text(values[name]) == _text(tree):
        yield {**values, name: tree}


def _fill(replacement: Any, values: Values) -> Any:
    """A replacement with what its wildcards stand for."""
    if isinstance(replacement, list):
        parts = [(each, _wildcard_of_several(each)) for each in replacement]
        return [new for each, name in parts for new in (values[name] if name else [_fill(each, values)])]
    if name := _wildcard(replacement):
        value = values[name]
        return ast.Expr(value) if isinstance(replacement, ast.Expr) and isinstance(value, ast.expr) else value
    if isinstance(replacement, ast.AST) and not isinstance(replacement, ast.Constant):
        return type(replacement)(**{name: _fill(value, values) for name, value in ast.iter_fields(replacement)})
    return replacement


def _wildcard(pattern: Any) -> str | None:
    """The name of a wildcard for one expression, statement or name."""
    node = pattern.value if isinstance(pattern, ast.Expr) else pattern
    name = node.id if isinstance(node, ast.Name) else node
    return name if isinstance(name, str) and _WILDCARD.fullmatch(name) else None


def _wildcard_of_several(pattern: Any) -> str | None:
    """The name of a wildcard for several expressions, statements or keyword arguments."""
    node = pattern.value if isinstance(pattern, ast.Expr) else pattern
    if not (isinstance(node, ast.Starred) or (isinstance(node, ast.keyword) and node.arg is None)):
        return None
    return _REST if ast.unparse(node.value) == _REST else _wildcard(node.value)


def _fields(node: ast.AST) -> list[Any]:
    return [value for name, value in ast.iter_fields(node) if name not in ("ctx", "type_comment", "kind")]


def _text(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_text(each) for each in tree]
    return ast.unparse(tree) if isinstance(tree, ast.AST) else tree
