"""What the output must look like: ``response_format`` and the other spellings of it, as one grammar.

The grammar itself is compiled and kept by the target, so a schema it can't compile is a 400 from there, before any
stream begins; here only shape and size are checked.
"""

from __future__ import annotations

from typing import Any

import orjson

from gateway.openai.fields import FieldReader, describe
from wire.sampling import Grammar

__all__ = ["CONSTRAINT_FIELDS", "MAX_GRAMMAR_CHARS", "parse_grammar", "parse_text_format"]

CONSTRAINT_FIELDS = frozenset(
    {"guided_choice", "guided_json", "guided_regex", "regex", "response_format", "structured_outputs"}
)

# A compiled grammar may be 1000 times its text; this is far more than any schema people write by hand.
MAX_GRAMMAR_CHARS = 1 << 16

_ANY_OBJECT = Grammar(kind="json_schema", text='{"type":"object"}')


def parse_grammar(reader: FieldReader) -> Grammar | None:
    """The one grammar a request asks for; None if it asks for none.

    Raises:
        InvalidRequest: a field is of the wrong shape or too long, or two of them ask for something.
    """
    asked = {
        "response_format": _response_format(reader),
        "structured_outputs": _structured_outputs(reader),
        "regex": _regex(reader, "regex"),
        "guided_regex": _regex(reader, "guided_regex"),
        "guided_json": _schema(reader, "guided_json"),
        "guided_choice": _choice(reader, "guided_choice"),
    }
    found = {name: grammar for name, grammar in asked.items() if grammar is not None}
    if len(found) > 1:
        first, second, *_ = found
        reader.fail(second, f"can't be combined with {first}")
    grammar = next(iter(found.values()), None)
    if grammar is not None:
        _check_end(reader, next(iter(found)))
    return grammar


def parse_text_format(reader: FieldReader) -> Grammar | None:
    """The Responses API's ``text.format``, where the schema stands beside the type.

    Raises:
        InvalidRequest: of the wrong shape or too long.
    """
    text = reader.child("text")
    child = None if text is None else text.child("format")
    if child is None:
        return None
    kind = child.require("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return _ANY_OBJECT
    if kind != "json_schema":
        child.fail("type", "must be text, json_object or json_schema")
    child.require("schema")
    return _schema(child, "schema")


def _check_end(reader: FieldReader, name: str) -> None:
    # The end of the grammar is told by an end token, so that has to be allowed there.
    if reader.get("ignore_eos"):
        reader.fail(name, "can't be combined with ignore_eos", code="unsupported_value")
    if reader.get("min_tokens"):
        reader.fail(name, "can't be combined with min_tokens", code="unsupported_value")


def _response_format(reader: FieldReader) -> Grammar | None:
    child = reader.child("response_format")
    if child is None or not child.values:
        return None
    kind = child.require("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return _ANY_OBJECT
    if kind == "json_schema":
        inner = child.child("json_schema")
        if inner is None:
            child.fail("json_schema", "is required", code="missing_required_parameter")
        inner.require("schema")
        return _schema(inner, "schema")
    if kind != "regex":
        shown = kind[:40] if isinstance(kind, str) else describe(kind)
        child.fail("type", f"must be text, json_object, json_schema or regex, not {shown}")
    child.require("regex")
    return _regex(child, "regex")


def _structured_outputs(reader: FieldReader) -> Grammar | None:
    child = reader.child("structured_outputs")
    if child is None:
        return None
    unknown = {name for name, value in child.values.items() if value is not None} - {
        "choice",
        "grammar",
        "json",
        "json_object",
        "regex",
    }
    if unknown:
        child.fail(min(unknown)[:40], "is not supported", code="unsupported_parameter")
    options = [_schema(child, "json"), _regex(child, "regex"), _choice(child, "choice"), _lark(child, "grammar")]
    if child.boolean("json_object"):
        options.append(_ANY_OBJECT)
    grammars = [grammar for grammar in options if grammar is not None]
    if len(grammars) > 1:
        reader.fail("structured_outputs", "must ask for one thing only")
    return grammars[0] if grammars else None


def _schema(reader: FieldReader, name: str) -> Grammar | None:
    value: Any = reader.get(name)
    if value is None:
        return None
    if isinstance(value, str):  # vLLM's clients may send the schema as text
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            reader.fail(name, "is a string but not JSON")
    if not isinstance(value, dict):
        reader.fail(name, f"must be a JSON schema object, not {describe(value)}", code="invalid_type")
    return _bounded(reader, name, Grammar(kind="json_schema", text=orjson.dumps(value).decode("utf-8")))


def _regex(reader: FieldReader, name: str) -> Grammar | None:
    value = reader.string(name)
    if value is None:
        return None
    if not value:
        reader.fail(name, "must not be empty")
    return _bounded(reader, name, Grammar(kind="regex", text=value))


def _lark(reader: FieldReader, name: str) -> Grammar | None:
    value = reader.string(name)
    return None if value is None else _bounded(reader, name, Grammar(kind="lark", text=value))


def _choice(reader: FieldReader, name: str) -> Grammar | None:
    value = reader.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(isinstance(entry, str) and entry for entry in value):
        reader.fail(name, "must be a non-empty array of non-empty strings", code="invalid_type")
    options = " | ".join(orjson.dumps(entry).decode("utf-8") for entry in value)
    return _bounded(reader, name, Grammar(kind="lark", text=f"start: {options}"))


def _bounded(reader: FieldReader, name: str, grammar: Grammar) -> Grammar:
    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        reader.fail(name, f"must have at most {MAX_GRAMMAR_CHARS} characters, not {len(grammar.text)}")
    return grammar
