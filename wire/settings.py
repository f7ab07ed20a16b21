"""Profiles to frozen dataclasses: TOML < environment < flag, unknown keys are errors.

Each component declares its own dataclass in its own config.py; this module only fills and checks them. A field's
``metadata={"help": ...}`` is its one sentence of documentation, for --help and docs/configuration.md.
"""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

__all__ = ["SCHEMA_VERSION", "ConfigError", "build_section", "env_name", "load_profile", "section_environ", "setting"]

Section = TypeVar("Section")

# What a profile's schema_version counts: raised when a setting is renamed, removed or comes to mean something else.
SCHEMA_VERSION = 1


class ConfigError(Exception):
    """A setting is unknown, of the wrong type or out of range.

    Args:
        key_path: dotted path of the setting, e.g. ``gateway.port``.
        message: what is wrong, and the allowed range.
    """

    def __init__(self, key_path: str, message: str) -> None:
        super().__init__(f"{key_path}: {message}")
        self.key_path = key_path
        self.message = message


def setting(default: Any, help_text: str) -> Any:
    """A dataclass field with a default and its sentence of documentation."""
    return dataclasses.field(default=default, metadata={"help": help_text})


def load_profile(path: Path) -> dict[str, dict[str, Any]]:
    """Tables of a TOML profile. A profile without ``schema_version`` is taken for one of the present version.

    Raises:
        ConfigError: not readable, not TOML, of another schema version, or a top-level key that is no table.
    """
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(str(path), f"can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"is not TOML: {error}") from None
    _check_version(data.pop("schema_version", SCHEMA_VERSION))
    for key, value in data.items():
        if not isinstance(value, dict):
            raise ConfigError(key, "must stand in a [section]")
    return data


def _check_version(version: object) -> None:
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ConfigError("schema_version", f"must be {SCHEMA_VERSION}, not {version!r}")
    if version > SCHEMA_VERSION:
        raise ConfigError(
            "schema_version", f"{version} is newer than this breakeven, which knows {SCHEMA_VERSION}: update breakeven"
        )


def env_name(section: str, key: str) -> str:
    """Name of the environment variable that overrides a setting, e.g. BREAKEVEN_GATEWAY_PORT."""
    return f"BREAKEVEN_{section}_{key}".upper()


def build_section(
    cls: type[Section],
    section: str,
    *,
    profile: Mapping[str, Any],
    environ: Mapping[str, str],
    flags: Mapping[str, Any] | None = None,
) -> Section:
    """One component's settings from all sources, then its own ``validate()``.

    Args:
        profile: the profile's table of this section.
        environ: environment variables; those of ``env_name`` are read, as strings.
        flags: command-line overrides; None values are ignored.

    Raises:
        ConfigError: unknown key, wrong type, or out of range.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in profile.items():
        if key not in fields:
            raise ConfigError(f"{section}.{key}", f"unknown setting; known are {', '.join(sorted(fields))}")
        values[key] = _convert(value, hints[key], f"{section}.{key}", strict=True)
    for key in fields:
        text = environ.get(env_name(section, key))
        if text is not None:
            values[key] = _convert(text, hints[key], env_name(section, key), strict=False)
    for key, value in (flags or {}).items():
        if value is None:
            continue
        if key not in fields:
            raise ConfigError(f"{section}.{key}", "unknown setting")
        values[key] = _convert(value, hints[key], f"{section}.{key}", strict=False)
    result = cls(**values)
    validate = getattr(result, "validate", None)
    if validate is not None:
        validate()
    return result


def section_environ(section: str, settings: Any) -> dict[str, str]:
    """The environment that makes another process read exactly these settings; unset (None) fields are left out."""
    environ = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value is not None:
            text = ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
            environ[env_name(section, field.name)] = text
    return environ


def _convert(value: Any, hint: Any, key_path: str, *, strict: bool) -> Any:
    if not strict and isinstance(value, str) and _is_sequence(hint):
        value = [part.strip() for part in value.split(",") if part.strip()]
    try:
        return msgspec.convert(value, hint, strict=strict, dec_hook=_decode_path)
    except msgspec.ValidationError as error:
        raise ConfigError(key_path, str(error)) from None


def _decode_path(hint: type, value: Any) -> Any:
    if hint is Path and isinstance(value, str | Path):
        return Path(value)
    raise TypeError(f"Expected a path, got {value!r}")  # msgspec makes it a ValidationError


def _is_sequence(hint: Any) -> bool:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return any(typing.get_origin(option) in (tuple, list, frozenset, set) for option in options)
