"""Every message that crosses a process border, grouped by who receives it.

Each message carries ``request_id``, ``round_id`` and ``base_len``, the committed length it was computed on. The
gateway's Session is the only truth about committed tokens: verifier and drafter align to what it says, and a reply
whose round is over is dropped and counted. No message holds a tensor: a ``TensorRef`` points into the shared ring.

A round of one request (K drafts, ``a`` of them accepted) in positions, L = base_len:

    context ids          0 .. L-1      committed before the round
    draft_ids            L .. L+K-1    proposed
    target_ids           K+1 ids       target_ids[i] = the target's own choice after context + draft_ids[:i]
    feature rows         L-1 .. L-1+K  aux hidden states of the inputs; rows up to L-1+a belong to committed tokens
"""

from __future__ import annotations

import msgspec

from wire.sampling import SamplingParams

__all__ = [
    "PROTOCOL_VERSION",
    "CloseRequest",
    "DraftClose",
    "DraftExtend",
    "DraftFailed",
    "DraftProposal",
    "DraftReplies",
    "DrafterInfo",
    "FeatureSpan",
    "Hello",
    "PositionLogprobs",
    "Refused",
    "Status",
    "StatusRequest",
    "TensorRef",
    "ToDrafter",
    "ToGateway",
    "ToVerifier",
    "TopLogprob",
    "VerifierInfo",
    "VerifyBatch",
    "VerifyFailed",
    "VerifyItem",
    "VerifyReply",
    "VerifyResult",
    "Welcome",
]

PROTOCOL_VERSION = 1


# ---------------------------------------------------------------- shared parts


class TensorRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where a tensor lies in the shared-memory ring. Reading with a generation that is over raises StaleTensor.

    Fields:
        ring_id: random number of the ring's writer; a restarted writer has another.
        slot, generation: the place, and which writing of it.
        shape: row-major dimensions; dtype: numpy name; nbytes: product of both.
    """

    ring_id: int
    slot: int
    generation: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class FeatureSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Aux hidden states of consecutive positions: row r of ``ref`` [rows, 3 * H] belongs to position ``start`` + r."""

    start: int
    ref: TensorRef


class TopLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One of the most likely ids at a position, natural log."""

    token_id: int
    logprob: float


class PositionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-softmax of the raw logits at one position: the chosen id's, and the most likely ones, best first."""

    token_id: int
    logprob: float
    top: tuple[TopLogprob, ...] = ()


# ---------------------------------------------------------------- to either server


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """First message of a client. The server answers Welcome, or Refused when the versions differ."""

    protocol_version: int
    role: str
    pid: int


class StatusRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Ask for a Status now; answered by the I/O thread, so also while a model is loading or a batch is running."""

    request_number: int


# ---------------------------------------------------------------- to the verifier


class VerifyItem(msgspec.Struct, frozen=True, kw_only=True):
    """One request's share of a verify batch. Owner of all fields: the gateway.

    Fields:
        start, token_ids: the committed ids start .. base_len-1; the verifier keeps its ids before ``start`` and
            replaces everything after. The first item of a request has start 0 and the whole prompt.
        draft_ids: [K] ids to verify, K >= 0; K = 0 is a plain decode step.
        sampling, prompt_len: set on the first item only; ids from prompt_len on count as output for penalties.
        features_from: emit the aux hidden states of positions features_from .. base_len-1+K; None = none wanted.
        num_logprobs: None = none; n = log-probabilities of each target id and of the n most likely ids.
        score_prompt: also return the log-probabilities of token_ids (echo); disables prefix reuse for this request.
    """

    request_id: str
    round_id: int
    base_len: int
    start: int
    token_ids: tuple[int, ...]
    draft_ids: tuple[int, ...] = ()
    sampling: SamplingParams | None = None
    prompt_len: int | None = None
    features_from: int | None = None
    num_logprobs: int | None = None
    score_prompt: bool = False


class VerifyBatch(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """All requests that waited when the verifier became free; verified in one forward pass."""

    batch_id: int
    items: tuple[VerifyItem, ...]


class CloseRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The request is over or its client left: drop it, also when it waits or runs; its cache may serve as prefix."""

    request_id: str


ToVerifier = Hello | StatusRequest | VerifyBatch | CloseRequest


# ---------------------------------------------------------------- to the drafter


class DraftExtend(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Align the drafter to the committed tokens, then propose ``num_draft_tokens`` ids (0 = only align).

    Fields:
        start, token_ids: the committed ids start .. base_len-1. The drafter keeps its ids before ``start``.
        spans: aux hidden states, contiguous, from where the drafter's own features end up to position base_len-2
            (the newest committed token has none yet).
        sampling: set on the first message of a request; its temperature and seed let the drafter draw with the
            target's own noise, which raises acceptance and never changes the output.
    """

    request_id: str
    round_id: int
    base_len: int
    start: int
    token_ids: tuple[int, ...]
    spans: tuple[FeatureSpan, ...]
    num_draft_tokens: int
    sampling: SamplingParams | None = None


class DraftClose(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The request is over: free its state."""

    request_id: str


ToDrafter = Hello | StatusRequest | DraftExtend | DraftClose


# ---------------------------------------------------------------- to the gateway


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The server will not talk to this client; the reason names both versions."""

    reason: str


class VerifierInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the verifier serves. ``eos_ids`` come from the model's own files."""

    model_dir: str
    model_type: str
    context_len: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    aux_layer_ids: tuple[int, ...]
    is_row_invariant: bool
    kernels: str


class DrafterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the drafter runs. ``aux_layer_ids``: the target layers whose inputs it was trained on."""

    head_dir: str
    head_format: str
    target_vocab_size: int
    draft_vocab_size: int
    feature_size: int
    aux_layer_ids: tuple[int, ...]
    max_draft_tokens: int


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Answer to Hello. ``ring_path``: the verifier's tensor ring; None from the drafter."""

    protocol_version: int
    role: str
    pid: int
    ring_path: str | None = None


class Status(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """State of a server: load phase with progress 0..1, then "ready"; counters are raw sums since its start."""

    request_number: int
    phase: str
    progress: float
    is_ready: bool
    counters: dict[str, int]
    verifier: VerifierInfo | None = None
    drafter: DrafterInfo | None = None
    ring_path: str | None = None
    error: str | None = None


class VerifyResult(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The target's own choices for one item.

    Fields:
        target_ids: [K+1].
        spans: features from features_from on, contiguous; rows of rejected drafts are included and must be ignored.
        logprobs: [K+1] or None. prompt_logprobs: [len(token_ids) - 1] or None, entry i scores token i + 1.
        cached_len: positions whose keys and values were reused instead of computed, on a request's first item.
    """

    request_id: str
    round_id: int
    base_len: int
    target_ids: tuple[int, ...]
    spans: tuple[FeatureSpan, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] | None = None
    prompt_logprobs: tuple[PositionLogprobs, ...] | None = None
    cached_len: int = 0


class VerifyFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This item could not be verified; the others of its batch are not affected."""

    request_id: str
    round_id: int
    base_len: int
    code: str
    message: str


class VerifyReply(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Results of one forward pass, possibly of items from several batches (a long prompt takes several passes).

    Fields:
        forward_s: wall time of the pass with sampling. num_rows: input rows of the pass; num_prefill_rows: those of
            prompts, which make its time useless as a cost of verification.
        num_forwards: forward passes since the verifier's start.
    """

    results: tuple[VerifyResult | VerifyFailed, ...]
    forward_s: float
    num_rows: int
    num_prefill_rows: int
    num_forwards: int


class DraftProposal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """``draft_ids`` [<= K] proposed after ``base_len`` committed tokens; shorter when the context limit is near."""

    request_id: str
    round_id: int
    base_len: int
    draft_ids: tuple[int, ...]


class DraftFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The drafter can't serve this round.

    code: "stale_features" (the ring moved on), "feature_gap" (spans don't continue what it holds), "unknown_request",
    "context_limit", "overloaded", "out_of_memory" (the drafter's GPU), "internal". The gateway goes plain for the round
    and re-syncs from position 0.
    """

    request_id: str
    round_id: int
    base_len: int
    code: str
    message: str


class DraftReplies(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """All proposals of one drafter batch. draft_s: wall time of the batch; num_rows: input rows it ran."""

    replies: tuple[DraftProposal | DraftFailed, ...]
    draft_s: float
    num_rows: int


ToGateway = Refused | Welcome | Status | VerifyReply | DraftReplies
