"""``$VAR`` and ``${VAR...}`` in a compose file, and the .env file they come from, resolved as Compose resolves them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPERATOR = re.compile(r":?[-?+]")


class InterpolationError(Exception):
    """A variable that must be set is not, or the expression makes no sense."""


def read_env_file(text: str) -> dict[str, str]:
    """NAME=VALUE lines; ``#`` starts a comment, at a line's start or after a blank; quotes are taken off."""
    values = {}
    for raw in text.splitlines():
        line = raw.strip().removeprefix("export ").lstrip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not _NAME.fullmatch(name.strip()):
            raise InterpolationError(f"not NAME=VALUE: {raw!r}")
        value = value.strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            values[name.strip()] = value[1:-1]
        else:
            values[name.strip()] = re.split(r"(?:^|\s)#", value, maxsplit=1)[0].rstrip()
    return values


def interpolate_tree(tree: Any, environ: Mapping[str, str]) -> Any:
    """Every string value of a parsed file; keys stay."""
    if isinstance(tree, dict):
        return {key: interpolate_tree(value, environ) for key, value in tree.items()}
    if isinstance(tree, list):
        return [interpolate_tree(value, environ) for value in tree]
    return interpolate(tree, environ) if isinstance(tree, str) else tree


def interpolate(text: str, environ: Mapping[str, str]) -> str:
    """One string.

    Raises:
        InterpolationError: ``${VAR:?}`` or ``${VAR?}`` without a value, or a ``$`` that starts nothing.
    """
    parts, at = [], 0
    while (dollar := text.find("$", at)) >= 0:
        parts.append(text[at:dollar])
        value, at = _expression(text, dollar, environ)
        parts.append(value)
    return "".join([*parts, text[at:]])


def variables(tree: Any) -> dict[str, str | None]:
    """Names used anywhere in a parsed file, with their default (None: there is none)."""
    found: dict[str, str | None] = {}

    class Recorder(dict[str, str]):
        def __missing__(self, name: str) -> str:
            raise KeyError(name)

        def get(self, name: str, default: Any = None) -> Any:
            found.setdefault(name, None)
            return default

    interpolate_tree(tree, Recorder())
    for name in found:
        pattern = re.compile(r"\$\{" + name + r":?-([^{}]*)\}")
        found[name] = next((m.group(1) for text in _strings(tree) for m in [pattern.search(text)] if m), None)
    return found


def _strings(tree: Any) -> list[str]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list):
        return [text for value in tree for text in _strings(value)]
    return [tree] if isinstance(tree, str) else []


def _expression(text: str, dollar: int, environ: Mapping[str, str]) -> tuple[str, int]:
    """Value of the expression at ``dollar``, and the position after it."""
    rest = text[dollar + 1 :]
    if rest.startswith("$"):
        return "$", dollar + 2
    if rest.startswith("{"):
        end = _closing_brace(text, dollar + 1)
        return _braced(text[dollar + 2 : end], environ), end + 1
    name = _NAME.match(rest)
    if name is None:
        raise InterpolationError(f"invalid $ in {text!r}")
    return environ.get(name.group(), ""), dollar + 1 + name.end()


def _closing_brace(text: str, opening: int) -> int:
    depth = 0
    for at in range(opening, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return at
    raise InterpolationError(f"no closing brace in {text!r}")


def _braced(body: str, environ: Mapping[str, str]) -> str:
    name = _NAME.match(body)
    if name is None:
        raise InterpolationError(f"no name in ${{{body}}}")
    value, rest = environ.get(name.group()), body[name.end() :]
    if not rest:
        return value or ""
    operator = _OPERATOR.match(rest)
    if operator is None:
        raise InterpolationError(f"unknown operator in ${{{body}}}")
    word = rest[operator.end() :]
    # With a colon an empty value counts as unset.
    is_set = bool(value) if operator.group().startswith(":") else value is not None
    match operator.group()[-1]:
        case "-":
            return value or "" if is_set else interpolate(word, environ)
        case "+":
            return interpolate(word, environ) if is_set else ""
        case _:
            if is_set:
                return value or ""
            raise InterpolationError(f"{name.group()}: {interpolate(word, environ) or 'must be set'}")
