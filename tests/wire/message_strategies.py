"""Hypothesis strategies for every message: whatever the types allow, with numbers MessagePack can carry."""

from __future__ import annotations

from hypothesis import strategies as st

from wire.messages import (
    CloseRequest,
    DraftClose,
    DrafterInfo,
    DraftExtend,
    DraftFailed,
    DraftProposal,
    DraftReplies,
    FeatureSpan,
    Hello,
    PositionLogprobs,
    Refused,
    Status,
    StatusRequest,
    TensorRef,
    TopLogprob,
    VerifierInfo,
    VerifyBatch,
    VerifyFailed,
    VerifyItem,
    VerifyReply,
    VerifyResult,
    Welcome,
)
from wire.sampling import SamplingParams

counts = st.integers(0, 2**63 - 1)
ids = st.lists(st.integers(0, 2**31), max_size=6).map(tuple)
floats = st.floats(allow_nan=False)
names = st.text(max_size=12)


def _tuples(of: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(of, max_size=3).map(tuple)


refs = st.builds(
    TensorRef,
    ring_id=counts,
    slot=counts,
    generation=counts,
    shape=_tuples(counts),
    dtype=names,
    nbytes=counts,
)
spans = _tuples(st.builds(FeatureSpan, start=counts, ref=refs))
logprobs = st.none() | _tuples(
    st.builds(
        PositionLogprobs,
        token_id=counts,
        logprob=floats,
        top=_tuples(st.builds(TopLogprob, counts, floats)),
    )
)
sampling = st.builds(
    SamplingParams,
    temperature=floats,
    top_k=counts,
    top_p=floats,
    min_p=floats,
    repetition_penalty=floats,
    presence_penalty=floats,
    frequency_penalty=floats,
    logit_bias=_tuples(st.tuples(counts, floats)),
    seed=counts,
    min_new_tokens=counts,
    eos_ids=ids,
)
items = st.builds(
    VerifyItem,
    request_id=names,
    round_id=counts,
    base_len=counts,
    start=counts,
    token_ids=ids,
    draft_ids=ids,
    sampling=st.none() | sampling,
    prompt_len=st.none() | counts,
    features_from=st.none() | counts,
    num_logprobs=st.none() | counts,
    score_prompt=st.booleans(),
)
_reply_keys = {"request_id": names, "round_id": counts, "base_len": counts}
results = st.builds(
    VerifyResult,
    **_reply_keys,
    target_ids=ids,
    spans=spans,
    logprobs=logprobs,
    prompt_logprobs=logprobs,
    cached_len=counts,
)
verifier_infos = st.builds(
    VerifierInfo,
    model_dir=names,
    model_type=names,
    context_len=counts,
    vocab_size=counts,
    hidden_size=counts,
    num_layers=counts,
    aux_layer_ids=ids,
    is_row_invariant=st.booleans(),
    kernels=names,
)
drafter_infos = st.builds(
    DrafterInfo,
    head_dir=names,
    head_format=names,
    target_vocab_size=counts,
    draft_vocab_size=counts,
    feature_size=counts,
    aux_layer_ids=ids,
    max_draft_tokens=counts,
)

hellos = st.builds(Hello, protocol_version=counts, role=names, pid=counts)
status_requests = st.builds(StatusRequest, request_number=counts)
to_verifier = st.one_of(
    hellos,
    status_requests,
    st.builds(VerifyBatch, batch_id=counts, items=_tuples(items)),
    st.builds(CloseRequest, request_id=names),
)
to_drafter = st.one_of(
    hellos,
    status_requests,
    st.builds(
        DraftExtend,
        **_reply_keys,
        start=counts,
        token_ids=ids,
        spans=spans,
        num_draft_tokens=counts,
        sampling=st.none() | sampling,
    ),
    st.builds(DraftClose, request_id=names),
)
to_gateway = st.one_of(
    st.builds(Refused, reason=names),
    st.builds(Welcome, protocol_version=counts, role=names, pid=counts, ring_path=st.none() | names),
    st.builds(
        Status,
        request_number=counts,
        phase=names,
        progress=floats,
        is_ready=st.booleans(),
        counters=st.dictionaries(names, counts, max_size=3),
        verifier=st.none() | verifier_infos,
        drafter=st.none() | drafter_infos,
        ring_path=st.none() | names,
        error=st.none() | names,
    ),
    st.builds(
        VerifyReply,
        results=_tuples(results | st.builds(VerifyFailed, **_reply_keys, code=names, message=names)),
        forward_s=floats,
        num_rows=counts,
        num_prefill_rows=counts,
        num_forwards=counts,
    ),
    st.builds(
        DraftReplies,
        replies=_tuples(
            st.builds(DraftProposal, **_reply_keys, draft_ids=ids)
            | st.builds(DraftFailed, **_reply_keys, code=names, message=names)
        ),
        draft_s=floats,
        num_rows=counts,
    ),
)
