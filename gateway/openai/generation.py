"""From a parsed request and its prompt's ids to the engine's requests, one per choice."""

from __future__ import annotations

from msgspec import structs

from gateway.errors import InvalidRequest
from gateway.openai.requests import SharedFields
from gateway.ports import GenerationRequest, TextCodec

__all__ = ["build_choices", "resolve_max_new_tokens"]

_SEED_MASK = 2**63 - 1


def resolve_max_new_tokens(
    shared: SharedFields, num_prompt_tokens: int, *, context_len: int, default: int | None
) -> int:
    """How many tokens one choice may have.

    Args:
        default: used if the client named no limit, cut to what the context leaves; None = all that it leaves.

    Raises:
        InvalidRequest: prompt and answer don't fit into the context together.
    """
    num_left = context_len - num_prompt_tokens
    asked = shared.max_new_tokens
    if num_left < (1 if asked is None else min(asked, 1)):
        raise InvalidRequest(
            f"The prompt has {num_prompt_tokens} tokens; the context of {context_len} tokens leaves no room to answer.",
            code="context_length_exceeded",
            param="messages" if default is None else "prompt",
        )
    if asked is None:
        return num_left if default is None else min(default, num_left)
    if asked > num_left:
        raise InvalidRequest(
            f"{shared.max_tokens_field} is {asked}, but the prompt has {num_prompt_tokens} tokens and the context "
            f"{context_len}: at most {num_left} are left.",
            code="context_length_exceeded",
            param=shared.max_tokens_field,
        )
    return asked


def build_choices(
    shared: SharedFields,
    prompt_ids: tuple[int, ...],
    *,
    first_id: str,
    first_index: int,
    max_new_tokens: int,
    codec: TextCodec,
    score_prompt: bool = False,
    deadline_s: float | None = None,
    shown_ids: frozenset[int] = frozenset(),
) -> list[GenerationRequest]:
    """One engine request per choice of one prompt.

    Args:
        first_id: the response's id; a choice's own is "<first_id>-<index>".
        first_index: index of the prompt's first choice in the response; choice i's seed is the request's plus i.
    """
    eos_ids = frozenset[int]() if shared.ignore_eos else codec.eos_ids
    base = shared.sampling
    eos_of_sampling: tuple[int, ...] = ()
    if base.min_new_tokens:
        eos_of_sampling = tuple(sorted(codec.eos_ids | shared.stop_token_ids))
    elif base.grammar is not None:  # the ids that may end the output when its grammar is complete
        eos_of_sampling = tuple(sorted(codec.eos_ids))
    choices = []
    for offset in range(shared.num_choices):
        seed = (base.seed + first_index + offset) & _SEED_MASK
        choices.append(
            GenerationRequest(
                request_id=f"{first_id}-{first_index + offset}",
                prompt_ids=prompt_ids,
                sampling=structs.replace(base, seed=seed, eos_ids=eos_of_sampling),
                max_new_tokens=max_new_tokens,
                stop_token_ids=shared.stop_token_ids | eos_ids,
                stop_strings=shared.stop_strings,
                include_stop_string=shared.include_stop_string,
                skip_special_tokens=shared.skip_special_tokens,
                num_logprobs=shared.num_logprobs,
                score_prompt=score_prompt,
                speculation=shared.speculation,
                deadline_s=deadline_s,
                shown_ids=shown_ids,
            )
        )
    return choices
