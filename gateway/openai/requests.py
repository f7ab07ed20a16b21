"""Fields that chat and completions requests share, from JSON to one typed record.

What each field means, and what happens to fields that are not here, is in docs/api.md and field_rules.py.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, Literal, cast

from gateway.config import GatewayConfig
from gateway.errors import InvalidRequest, NotFound
from gateway.openai.constraints import parse_grammar
from gateway.openai.fields import FieldReader, describe
from gateway.ports import ModelCard, SpeculationOverride
from wire.sampling import SamplingParams

__all__ = ["MAX_INTEGER", "RequestRules", "SharedFields", "StreamOptions", "check_model", "parse_shared_fields"]

MAX_INTEGER = 2**31 - 1

_SEED_MASK = 2**63 - 1
# top_p = 0 is legal in OpenAI's API and means "the most likely token only"; the engine wants a positive share.
_SMALLEST_TOP_P = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRules:
    """What a request is checked against: the edge's limits, the model, and the request's headers.

    ``speculation_header``: the value of ``x-speculation``, or None.
    """

    config: GatewayConfig
    card: ModelCard
    speculation_header: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """How a stream reports usage. ``continuous_usage`` only counts together with ``include_usage``."""

    include_usage: bool = False
    continuous_usage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFields:
    """A request without its prompt.

    Fields:
        model: the name the answer carries.
        sampling: without ``eos_ids``; ``seed`` is choice 0's, choice i uses seed + i.
        num_choices: n.
        max_new_tokens: None = up to the context length.
        max_tokens_field: the name the client used for it, for error messages.
        stop_token_ids: the client's own, EOS not among them.
        num_logprobs: None = none; n >= 0 = the token's own and the n most likely.
        stream: None for one JSON answer.
        stream_interval: tokens in one event; 0 = whatever a round commits.
        parses_tools: the text may hold tool calls, which become a part of the answer of their own.
        separates_reasoning: so do the model's thoughts, if the configuration says how they are marked.
        includes_reasoning: the client wants to see them.
    """

    model: str
    sampling: SamplingParams
    num_choices: int
    max_new_tokens: int | None
    max_tokens_field: str
    stop_strings: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    include_stop_string: bool
    skip_special_tokens: bool
    num_logprobs: int | None
    speculation: SpeculationOverride
    stream: StreamOptions | None
    return_spec_stats: bool
    return_token_ids: bool = False
    stream_interval: int = 0
    parses_tools: bool = False
    separates_reasoning: bool = True
    includes_reasoning: bool = True


def parse_shared_fields(
    reader: FieldReader, rules: RequestRules, *, num_logprobs: int | None, max_tokens: tuple[str, int | None]
) -> SharedFields:
    """Check and convert all shared fields.

    Args:
        num_logprobs: read by the caller, because chat and completions spell it differently.
        max_tokens: the field's name and value, for the same reason.

    Raises:
        InvalidRequest: names the field at fault.
        NotFound: the model is not served here.
    """
    config = rules.config
    num_choices = reader.integer("n", default=1, low=1, high=config.max_choices)
    if reader.integer("best_of", default=None, low=0, high=MAX_INTEGER) not in (None, 1, num_choices):
        reader.fail("best_of", "must be 1 or equal to n: all choices are returned", code="unsupported_value")
    return SharedFields(
        model=_required_model(reader, rules),
        sampling=_sampling(reader, rules),
        num_choices=num_choices,
        max_new_tokens=max_tokens[1],
        max_tokens_field=max_tokens[0],
        stop_strings=_stop_strings(reader, config),
        stop_token_ids=_stop_token_ids(reader, rules.card.vocab_size),
        ignore_eos=reader.boolean("ignore_eos"),
        include_stop_string=reader.boolean("include_stop_str_in_output") or reader.boolean("no_stop_trim"),
        skip_special_tokens=reader.boolean("skip_special_tokens", default=True),
        num_logprobs=num_logprobs,
        speculation=_speculation(reader, rules),
        stream=_stream_options(reader),
        return_spec_stats=reader.boolean("return_spec_stats"),
        return_token_ids=reader.boolean("return_token_ids"),
        stream_interval=reader.integer("stream_interval", default=config.stream_interval, low=1, high=1 << 16),
    )


def _required_model(reader: FieldReader, rules: RequestRules) -> str:
    if not rules.config.allow_any_model:
        reader.require("model")
    return check_model(reader, rules)


def check_model(reader: FieldReader, rules: RequestRules) -> str:
    """The model name the answer carries; an absent ``model`` means the served one.

    Raises:
        NotFound: another model is asked for.
    """
    name = reader.string("model", max_chars=512)
    card = rules.card
    if name is None or name == card.name:
        return card.name
    if name in card.aliases:
        return name
    if rules.config.allow_any_model:
        return card.name
    served = ", ".join([card.name, *card.aliases])
    raise NotFound(
        f"The model {name[:100]!r} does not exist here; served: {served}.", code="model_not_found", param="model"
    )


def _sampling(reader: FieldReader, rules: RequestRules) -> SamplingParams:
    seed = reader.integer("seed", default=None, low=-(2**63), high=2**63 - 1)
    top_k = reader.integer("top_k", default=0, low=-1, high=MAX_INTEGER)
    return SamplingParams(
        temperature=reader.number("temperature", default=1.0, low=0.0, high=2.0),
        top_k=max(top_k, 0),
        top_p=max(reader.number("top_p", default=1.0, low=0.0, high=1.0), _SMALLEST_TOP_P),
        min_p=reader.number("min_p", default=0.0, low=0.0, high=1.0),
        repetition_penalty=reader.number("repetition_penalty", default=1.0, low=0.0, high=100.0, open_low=True),
        presence_penalty=reader.number("presence_penalty", default=0.0, low=-2.0, high=2.0),
        frequency_penalty=reader.number("frequency_penalty", default=0.0, low=-2.0, high=2.0),
        logit_bias=_logit_bias(reader, rules),
        seed=secrets.randbits(63) if seed is None else seed & _SEED_MASK,
        min_new_tokens=reader.integer("min_tokens", default=0, low=0, high=MAX_INTEGER),
        grammar=parse_grammar(reader),
    )


def _logit_bias(reader: FieldReader, rules: RequestRules) -> tuple[tuple[int, float], ...]:
    child = reader.child("logit_bias")
    if child is None:
        return ()
    if len(child.values) > rules.config.max_logit_bias:
        reader.fail("logit_bias", f"must have at most {rules.config.max_logit_bias} entries, not {len(child.values)}")
    bias: dict[int, float] = {}
    for key in child.values:
        token_id = int(key) if key.isascii() and key.isdecimal() and len(key) <= 10 else -1
        if not 0 <= token_id < rules.card.vocab_size:
            reader.fail("logit_bias", f"has the key {key[:40]!r}, which is no token id below {rules.card.vocab_size}")
        if token_id in bias:
            reader.fail("logit_bias", f"names the token id {token_id} twice")
        value = child.number(key, default=None, low=-100.0, high=100.0)
        if value is None:
            reader.fail("logit_bias", f"has no number for the key {key}")
        bias[token_id] = value
    return tuple(bias.items())


def _stop_strings(reader: FieldReader, config: GatewayConfig) -> tuple[str, ...]:
    value = reader.get("stop")
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        reader.fail("stop", "must be a string or an array of strings", code="invalid_type")
    if len(stops) > config.max_stop_strings:
        reader.fail("stop", f"must have at most {config.max_stop_strings} strings, not {len(stops)}")
    for stop in stops:
        if not 1 <= len(stop) <= config.max_stop_chars:
            reader.fail("stop", f"must hold strings of 1 to {config.max_stop_chars} characters, not {len(stop)}")
    return tuple(dict.fromkeys(stops))


def _stop_token_ids(reader: FieldReader, vocab_size: int) -> frozenset[int]:
    value = reader.get("stop_token_ids")
    if value is None:
        return frozenset()
    if not isinstance(value, list):
        reader.fail("stop_token_ids", f"must be an array, not {describe(value)}", code="invalid_type")
    if len(value) > vocab_size or not all(type(token_id) is int and 0 <= token_id < vocab_size for token_id in value):
        reader.fail("stop_token_ids", f"must hold token ids below {vocab_size}")
    return frozenset(value)


def _stream_options(reader: FieldReader) -> StreamOptions | None:
    is_stream = reader.boolean("stream")
    options = reader.child("stream_options")
    if not is_stream:
        if options is not None:
            reader.fail("stream_options", "is only allowed when stream is true")
        return None
    if options is None:
        return StreamOptions()
    options.boolean("include_obfuscation")  # checked, then ignored: nothing is padded
    return StreamOptions(
        include_usage=options.boolean("include_usage"), continuous_usage=options.boolean("continuous_usage_stats")
    )


def _speculation(reader: FieldReader, rules: RequestRules) -> SpeculationOverride:
    child = reader.child("speculation")
    if child is None:
        return SpeculationOverride(mode=_mode(rules.speculation_header, "x-speculation"))
    unknown = child.values.keys() - {"mode", "num_draft_tokens"}
    if unknown:
        child.fail(min(unknown)[:40], "is not a known field", code="unknown_parameter")
    body_mode = child.string("mode")
    return SpeculationOverride(
        mode=_mode(rules.speculation_header if body_mode is None else body_mode, "speculation.mode"),
        num_draft_tokens=child.integer("num_draft_tokens", default=None, low=1, high=rules.config.max_draft_tokens),
    )


def _mode(value: Any, param: str) -> Literal["auto", "on", "off"]:
    if value is None:
        return "auto"
    if value not in ("auto", "on", "off"):
        raise InvalidRequest(f"{param} must be auto, on or off.", param=param)
    return cast("Literal['auto', 'on', 'off']", value)
