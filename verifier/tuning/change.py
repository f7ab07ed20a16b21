"""One change of an engine's launch settings, and what it makes of a profile. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from verifier.sglang.config import SGLangConfig

__all__ = ["Change", "apply_changes", "change_from_json", "settings_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Exactly one setting.

    Fields:
        kind: "arg" (a flag of sglang.launch_server) or "env" (a variable of its environment).
        key: ``--flag`` or NAME.
        values: what it is set to; () is a switch without value; None removes it.
    """

    kind: Literal["arg", "env"]
    key: str
    values: tuple[str, ...] | None

    @property
    def text(self) -> str:
        """For people, as it is typed."""
        if self.values is None:
            return f"without {self.key}"
        if self.kind == "env":
            return f"{self.key}={self.values[0] if self.values else ''}"
        return " ".join((self.key, *self.values))

    def as_json(self) -> dict[str, object]:
        """For the ledger."""
        return {"kind": self.kind, "key": self.key, "values": None if self.values is None else list(self.values)}


def change_from_json(data: dict[str, object]) -> Change:
    """The inverse of ``as_json``."""
    values = data["values"]
    kind: Literal["arg", "env"] = "env" if data["kind"] == "env" else "arg"
    return Change(
        kind=kind,
        key=str(data["key"]),
        values=None if values is None else tuple(str(value) for value in values),  # type: ignore[attr-defined]
    )


def apply_changes(config: SGLangConfig, changes: Sequence[Change]) -> SGLangConfig:
    """``config`` with every change made, in order."""
    args, env = list(config.args), list(config.env)
    for change in changes:
        if change.kind == "arg":
            args = _with_arg(args, change)
        else:
            env = [entry for entry in env if entry.partition("=")[0] != change.key]
            if change.values is not None:
                env.append(f"{change.key}={change.values[0] if change.values else ''}")
    return dataclasses.replace(config, args=tuple(args), env=tuple(env))


def settings_of(config: SGLangConfig, change: Change) -> tuple[str, ...] | None:
    """What the profile has now where ``change`` would act; None if nothing."""
    if change.kind == "env":
        for entry in config.env:
            name, _, value = entry.partition("=")
            if name == change.key:
                return (value,)
        return None
    found = _find(list(config.args), change.key)
    if found is None:
        return None
    begin, end = found
    head = config.args[begin]
    return (head.partition("=")[2],) if "=" in head else tuple(config.args[begin + 1 : end])


def _with_arg(args: list[str], change: Change) -> list[str]:
    found = _find(args, change.key)
    new = [] if change.values is None else [change.key, *change.values]
    if found is None:
        return args + new
    begin, end = found
    return args[:begin] + new + args[end:]


def _find(args: list[str], flag: str) -> tuple[int, int] | None:
    """First and one past the last entry of a flag with its values."""
    for begin, arg in enumerate(args):
        if arg == flag or arg.startswith(flag + "="):
            end = begin + 1
            while "=" not in arg and end < len(args) and not args[end].startswith("--"):
                end += 1
            return begin, end
    return None
