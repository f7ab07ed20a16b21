"""Settings of the HTTP edge. The loader (profile, environment, flags) is wire/settings.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from wire.settings import ConfigError

__all__ = ["GatewayConfig"]

_MIN_KEY_CHARS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """What the HTTP edge listens on, whom it lets in and how much a request may ask for."""

    host: str = field(default="127.0.0.1", metadata={"help": "Address to listen on; 0.0.0.0 for all interfaces."})
    port: int = field(default=8000, metadata={"help": "TCP port to listen on; 0 picks a free one."})
    api_keys: tuple[str, ...] = field(
        default=(), repr=False, metadata={"help": "Accepted API keys; none leaves the gateway open to all."}
    )
    api_key_file: Path | None = field(
        default=None, metadata={"help": "File with more accepted API keys, one a line; # starts a comment line."}
    )
    max_running_per_key: int = field(
        default=0, metadata={"help": "Most requests of one API key at the same time; 0 sets no limit."}
    )
    max_requests_per_minute: int = field(
        default=0, metadata={"help": "Most requests of one API key in a minute; 0 sets no limit."}
    )
    max_body_bytes: int = field(default=32 << 20, metadata={"help": "Largest request body, after decompression."})
    body_timeout_s: float = field(default=60.0, metadata={"help": "Seconds a client may take to send its body."})
    write_timeout_s: float = field(
        default=60.0, metadata={"help": "Seconds a client may not read its stream before it counts as gone."}
    )
    max_choices: int = field(default=16, metadata={"help": "Largest n, and best_of, of one request."})
    max_prompts: int = field(default=64, metadata={"help": "Most prompts in one completions request."})
    max_messages: int = field(default=4096, metadata={"help": "Most messages in one chat request."})
    max_stop_strings: int = field(default=4, metadata={"help": "Most stop strings in one request."})
    max_stop_chars: int = field(default=1024, metadata={"help": "Longest stop string, in characters."})
    max_logprobs: int = field(default=20, metadata={"help": "Largest top_logprobs, and completions logprobs."})
    max_logit_bias: int = field(default=1024, metadata={"help": "Most entries in logit_bias."})
    max_draft_tokens: int = field(default=16, metadata={"help": "Largest speculation.num_draft_tokens of a request."})
    default_max_tokens: int = field(
        default=16, metadata={"help": "Completions answer length if the client names none."}
    )
    stream_interval: int = field(
        default=0, metadata={"help": "Tokens in one event of a stream; 0 sends whatever a round commits, at once."}
    )
    keep_alive_s: float = field(
        default=15.0, metadata={"help": "Idle seconds before a stream gets a keep-alive comment; 0 sends none."}
    )
    reasoning_markers: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Texts that begin and end the model's thoughts, e.g. <think>,</think>; they become "
            "reasoning_content. None: the text stays as it comes."
        },
    )
    reasoning_opens: Literal["auto", "always", "never"] = field(
        default="auto",
        metadata={"help": "Does the chat template begin the thoughts itself? auto: look at the end of each prompt."},
    )
    reasoning_alias: bool = field(
        default=False, metadata={"help": "Send the thoughts under the name reasoning too, as vLLM does."}
    )
    max_stored_responses: int = field(
        default=1024, metadata={"help": "Responses kept in memory to be asked for later; 0 stores none."}
    )
    max_stored_bytes: int = field(
        default=64 << 20, metadata={"help": "Memory for stored responses; beyond it the oldest are forgotten."}
    )
    stored_response_ttl_s: float = field(
        default=3600.0, metadata={"help": "Seconds a stored response is kept after its end."}
    )
    otlp_endpoint: str = field(
        default="",
        metadata={
            "help": "OpenTelemetry collector that gets a span for each request, e.g. http://127.0.0.1:4318/v1/traces; "
            "needs the extra [otel]. Empty: no traces."
        },
    )
    is_strict: bool = field(default=False, metadata={"help": "Refuse unknown request fields instead of ignoring them."})
    allow_any_model: bool = field(
        default=False, metadata={"help": "Answer whatever model name the client asks for, also none at all."}
    )

    def validate(self) -> None:
        """Check every range once.

        Raises:
            ConfigError: names the key path and the allowed range.
        """
        if not self.host:
            raise ConfigError("gateway.host", "must not be empty")
        _check_range("port", self.port, 0, 65_535)
        _check_range("max_body_bytes", self.max_body_bytes, 1024, 1 << 30)
        _check_range("body_timeout_s", self.body_timeout_s, 0.05, 3600)
        _check_range("write_timeout_s", self.write_timeout_s, 0.05, 3600)
        _check_range("max_choices", self.max_choices, 1, 128)
        _check_range("max_prompts", self.max_prompts, 1, 4096)
        _check_range("max_messages", self.max_messages, 1, 1 << 20)
        _check_range("max_stop_strings", self.max_stop_strings, 0, 256)
        _check_range("max_stop_chars", self.max_stop_chars, 1, 1 << 16)
        _check_range("max_logprobs", self.max_logprobs, 0, 1024)
        _check_range("max_logit_bias", self.max_logit_bias, 0, 1 << 20)
        _check_range("max_draft_tokens", self.max_draft_tokens, 1, 64)
        _check_range("default_max_tokens", self.default_max_tokens, 1, 1 << 20)
        _check_range("stream_interval", self.stream_interval, 0, 1 << 16)
        _check_range("keep_alive_s", self.keep_alive_s, 0, 3600)
        _check_range("max_running_per_key", self.max_running_per_key, 0, 1 << 20)
        _check_range("max_requests_per_minute", self.max_requests_per_minute, 0, 1 << 20)
        _check_range("max_stored_responses", self.max_stored_responses, 0, 1 << 20)
        _check_range("max_stored_bytes", self.max_stored_bytes, 1 << 16, 1 << 36)
        _check_range("stored_response_ttl_s", self.stored_response_ttl_s, 1, 30 * 86_400)
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError("gateway.otlp_endpoint", "must begin with http:// or https://")
        if len(self.reasoning_markers) not in (0, 2) or not all(marker.strip() for marker in self.reasoning_markers):
            raise ConfigError("gateway.reasoning_markers", "must be two texts, or none")
        self.all_api_keys()

    def all_api_keys(self) -> tuple[str, ...]:
        """Keys of the setting and of the key file, in that order.

        Raises:
            ConfigError: a key is too weak to be one, or the file can't be read or holds none.
        """
        keys = [(f"gateway.api_keys[{index}]", key) for index, key in enumerate(self.api_keys)]
        keys += self._keys_of_file()
        for place, key in keys:
            if len(key) < _MIN_KEY_CHARS or not key.isascii() or key != key.strip():
                raise ConfigError(place, f"must be at least {_MIN_KEY_CHARS} ASCII characters, without spaces around")
        return tuple(key for _, key in keys)

    def _keys_of_file(self) -> list[tuple[str, str]]:
        if self.api_key_file is None:
            return []
        try:
            lines = self.api_key_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("gateway.api_key_file", f"can't be read: {error}") from None
        keys = [
            (f"gateway.api_key_file line {number}", line.strip())
            for number, line in enumerate(lines, start=1)
            if line.strip() and not line.startswith("#")
        ]
        if not keys:  # an empty file must not open the gateway to all
            raise ConfigError("gateway.api_key_file", "holds no key")
        return keys


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # false for NaN too
        raise ConfigError(f"gateway.{name}", f"must be between {low} and {high}, not {value}")
