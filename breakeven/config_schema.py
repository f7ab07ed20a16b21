"""The JSON schema of a profile, from the settings dataclasses: for editors, and for tools that write profiles."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import msgspec

from breakeven.settings import SECTIONS
from wire.settings import SCHEMA_VERSION

__all__ = ["profile_schema", "render_schema"]


def profile_schema() -> dict[str, Any]:
    """Types, defaults and sentences of every key. Ranges are checked by the program alone."""
    sections = {section: _section(cls) for section, cls in SECTIONS.items()}
    version = {"const": SCHEMA_VERSION, "description": "Version of this schema; the present one if left out."}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "breakeven profile",
        "type": "object",
        "properties": {"schema_version": version, **sections},
        "additionalProperties": False,
    }


def render_schema() -> str:
    """As text, for a file or the terminal."""
    return json.dumps(profile_schema(), indent=2) + "\n"


def _section(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    properties = {}
    for field in dataclasses.fields(cls):
        schema = msgspec.json.schema(hints[field.name], schema_hook=_path)
        default = str(field.default) if isinstance(field.default, Path) else field.default
        if default is not None:
            schema["default"] = list(default) if isinstance(default, tuple) else default
        properties[field.name] = {**schema, "description": field.metadata["help"]}
    doc = (cls.__doc__ or "").strip().splitlines()[0]
    return {"type": "object", "description": doc, "properties": properties, "additionalProperties": False}


def _path(hint: type) -> dict[str, Any]:
    if issubclass(hint, Path):
        return {"type": "string"}
    raise NotImplementedError(hint)
