"""What the HTTP edge asks of the rest of the gateway, and what the gateway's loop asks of the other processes.

Everything above a port is typed; nothing below the HTTP edge sees JSON (STYLE M5). compose.py names the classes that
implement these Protocols.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from gateway.stats import StatsSnapshot
from wire.messages import DraftExtend, DraftProposal, VerifyItem, VerifyReply
from wire.sampling import SamplingParams

__all__ = [
    "ChatMessage",
    "DrafterPort",
    "Engine",
    "FinishReason",
    "GenerationDelta",
    "GenerationFinished",
    "GenerationRequest",
    "LoadPhase",
    "ModelCard",
    "PromptScored",
    "RequestSpeculation",
    "SpeculationOverride",
    "TextCodec",
    "TokenLogprob",
    "ToolCall",
    "Usage",
    "VerifierPort",
]

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOverride:
    """What the client asked of speculation for its own request.

    mode "auto" leaves it to the controller, "off" is plain decode, "on" always drafts ``num_draft_tokens`` (or the
    configured default when None).
    """

    mode: Literal["auto", "on", "off"] = "auto"
    num_draft_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One choice to generate: token ids in, token ids and text out.

    Fields:
        request_id: unique among live requests; a choice of an n > 1 request has its own.
        prompt_ids: [T] token ids, T >= 1, T + max_new_tokens <= context length.
        max_new_tokens: >= 0; 0 is only useful with ``score_prompt``.
        stop_token_ids: ids that end the answer (EOS included unless the client ignores it); the id itself is not text.
        stop_strings: texts that end the answer; cut out of it unless ``include_stop_string``.
        shown_ids: special tokens that are text all the same, because somebody above looks for them.
        num_logprobs: None = no logprobs; n >= 0 = the token's own and the n most likely.
        score_prompt: also return the logprobs of the prompt (echo), as one ``PromptScored`` first.
        deadline_s: seconds this request may take in all; None = the configured limit.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    include_stop_string: bool = False
    skip_special_tokens: bool = True
    num_logprobs: int | None = None
    score_prompt: bool = False
    speculation: SpeculationOverride = field(default_factory=SpeculationOverride)
    deadline_s: float | None = None
    shown_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Natural-log probability of one token under the raw logits (before bias, penalties and temperature).

    ``top``: the most likely (token id, logprob) pairs, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScored:
    """The prompt's own logprobs: one entry per prompt token, the first is None (nothing predicts it)."""

    logprobs: tuple[TokenLogprob | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDelta:
    """New text that is safe to send, with the tokens it came from.

    ``text`` may be empty while characters are held back; ``token_ids`` are counted in the delta in which they were
    committed. Over a whole answer the texts concatenate to the full decode and the ids to the full output.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts after cutting at the stop; ``cached_tokens`` of the prompt were served from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpeculation:
    """What speculation did for one request. ``num_rounds`` counts rounds with at least one draft token.

    ``queue_s``: waiting for a place; ``prefill_s``: the prompt's round, which is not in ``verify_s``.
    """

    num_rounds: int
    num_plain_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    draft_s: float
    verify_s: float
    fallback_reason: str | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFinished:
    """Always the last event of a generation that did not raise. ``matched_stop`` is the string or id that ended it."""

    finish_reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    speculation: RequestSpeculation


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """The one model this gateway serves. ``context_len`` and ``vocab_size`` are 0 until the target has loaded."""

    name: str
    aliases: tuple[str, ...]
    context_len: int
    vocab_size: int
    created_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPhase:
    """Where start-up stands, e.g. phase "loading target", progress 0.4; ``is_ready`` once requests are taken."""

    is_ready: bool
    is_draining: bool
    phase: str
    progress: float | None = None


class Engine(Protocol):
    """Generates. The HTTP edge holds one."""

    def generate(
        self, request: GenerationRequest
    ) -> AsyncGenerator[PromptScored | GenerationDelta | GenerationFinished, None]:
        """Run one request. Cancelling the iterating task, or closing the iterator, aborts it at the target at once.

        Raises:
            GatewayError: a typed error; before the first event it can still become an HTTP status.
        """
        ...

    def admit(self, num_choices: int) -> None:
        """Reserve room for ``num_choices`` generations, before any of them starts.

        Raises:
            QueueFull, NotReady, Draining: with retry_after_s.
        """
        ...

    def release(self, num_choices: int) -> None:
        """Give back what ``admit`` reserved; call once per admit, also after an error."""
        ...

    def stats(self) -> StatsSnapshot:
        """One consistent snapshot."""
        ...

    def load_phase(self) -> LoadPhase:
        """Where start-up or draining stands; cheap, never blocks."""
        ...

    def model_card(self) -> ModelCard:
        """The served model; known from the config, also while loading."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call the assistant made in an earlier turn; ``arguments`` is the JSON text it wrote."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One chat message after parsing: content parts are already joined to one text.

    ``reasoning``: what the assistant thought in an earlier turn; templates that know it decide what becomes of it.
    """

    role: str
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None


class TextCodec(Protocol):
    """Text to token ids and back, with the target's own tokenizer and chat template."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of ``text``; special tokens written in it are recognised."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of all ids at once."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes this id stands for (special tokens: their literal text), also when not valid UTF-8."""
        ...

    def render_chat(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> list[int]:
        """Apply the chat template, then encode.

        Raises:
            InvalidRequest: the template refuses the messages.
        """
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """All ids that end an answer."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that are left out of the text when special tokens are skipped."""
        ...


class VerifierPort(Protocol):
    """The target, wherever it runs."""

    async def verify(self, items: Sequence[VerifyItem], *, timeout_s: float) -> VerifyReply:
        """Verify items in one batch and wait until all are answered.

        Raises:
            PeerError: the target is gone, or too slow.
        """
        ...

    @property
    def mixes_plain_rounds(self) -> bool:
        """True if plain rounds and drafted ones cost least in one batch; False if they go separate ways there."""
        ...

    def can_verify(self, sampling: SamplingParams) -> str | None:
        """Why drafts can't be verified exactly with these parameters, or None. The reason is counted, the run plain."""
        ...

    def close_request(self, request_id: str) -> None:
        """Tell the target to forget a request, at once and without waiting."""
        ...


class DrafterPort(Protocol):
    """The drafter."""

    async def extend(self, message: DraftExtend, *, timeout_s: float) -> DraftProposal:
        """Align the drafter and get its proposal.

        Raises:
            PeerError: gone, too slow, or it can't serve this round; the round then goes plain.
        """
        ...

    def close(self, request_id: str) -> None:
        """Tell the drafter to forget a request, at once and without waiting."""
        ...
