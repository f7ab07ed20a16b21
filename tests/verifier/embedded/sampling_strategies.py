"""Sampling parameters, alone and combined, at their edges."""

from __future__ import annotations

from hypothesis import strategies as st

from wire.sampling import SamplingParams


def any_params(vocab_size: int) -> st.SearchStrategy[SamplingParams]:
    """Values are such that sums and comparisons of logits in multiples of 1/8 are exact, and ties do happen."""
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.0, 0.25, 0.5, 0.8, 1.0, 2.0]),
        top_k=st.sampled_from([0, 0, 1, 2, 5, 11, 12, 50]),
        top_p=st.sampled_from([1.0, 1.0, 0.95, 0.7, 0.31, 1e-9]),
        min_p=st.sampled_from([0.0, 0.0, 0.013, 0.23, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7, 2.0]),
        presence_penalty=st.sampled_from([0.0, 0.0, 0.5, -0.75, 2.0]),
        frequency_penalty=st.sampled_from([0.0, 0.0, 0.25, -0.5, 2.0]),
        logit_bias=st.lists(
            st.tuples(st.integers(0, vocab_size - 1), st.sampled_from([-100.0, -1.5, 0.5, 100.0])), max_size=3
        ).map(tuple),
        seed=st.integers(0, 2**63 - 1),
        min_new_tokens=st.sampled_from([0, 0, 1, 3, 6]),
        eos_ids=st.sampled_from([(), (0,), (0, 3)]),
    )
