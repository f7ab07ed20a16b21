"""Which entry of SGLang's lists belongs to which position, and the request that makes it so.

Committed ids C (length c), drafts D (length k), input_ids = C + D, logprob_start_len = s <= c-1:

    input_top_logprobs[0]           None: nothing in the reply predicts position s
    input_top_logprobs[c-s + i]     distribution after C + D[:i], so of target_ids[i], for i = 0 .. k-1
    output_top_logprobs[0]          distribution after C + D, of target_ids[k] (the bonus token)
    hidden_states[0]                rows of the computed positions cached_tokens .. c+k-1

The prefix cache is matched up to s at most, floored to a page, so s = c-1 keeps everything committed but the newest
token, and a smaller s makes the engine compute positions s .. again: that is how missing features are fetched. A prompt
whose features are wanted has a cache namespace of its own instead: computed whole, without logits for every position.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import msgspec

from verifier.sglang.answers import Answer, Listed
from verifier.sglang.plugin.announcement import first_wanted, new_rid
from verifier.sglang.plugin.orders import Drawn, DrawOrder, PluginReport, custom_params
from wire.errors import PeerRefused
from wire.sampling import SamplingParams

__all__ = [
    "Ask",
    "TopList",
    "batch_payload",
    "drawn_ids",
    "output_logprob",
    "position_lists",
    "prompt_lists",
    "read_report",
    "report_payload",
    "stream_payload",
    "unsupported_grammar",
]

# (token id, log-probability under the raw logits), best first.
TopList = list[tuple[int, float]]


# The engine's name for each kind of grammar; "lark" has none.
_GRAMMAR_FIELDS = {"json_schema": "json_schema", "regex": "regex"}


def unsupported_grammar(params: SamplingParams) -> str | None:
    """Why the engine can't follow this grammar, or None."""
    if params.grammar is None or params.grammar.kind in _GRAMMAR_FIELDS:
        return None
    return f"SGLang knows no grammar of kind {params.grammar.kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One sequence of a batch request.

    base_len: committed ids among ``input_ids``; the rest are drafts. start_len: s above. num_top: length of the lists.
    order: the plugin draws the target's ids; None = they are chosen here, from the lists. is_round: a verify round,
    short enough that nobody has to abort it, unlike a prompt.
    """

    rid: str
    input_ids: list[int]
    base_len: int
    start_len: int
    num_top: int
    wants_hidden: bool
    cache_key: str = ""
    order: DrawOrder | None = None
    is_round: bool = False

    @property
    def num_drafts(self) -> int:
        """K."""
        return len(self.input_ids) - self.base_len

    def again(self) -> Ask:
        """The same under a fresh rid."""
        return dataclasses.replace(self, rid=new_rid(first_wanted(self.rid) or 0))


def batch_payload(asks: list[Ask]) -> dict[str, Any]:
    """The body of one POST /generate for all sequences.

    Temperature 0, so that also the output position's list is of the raw distribution; we draw ourselves, or the plugin.
    """
    payload: dict[str, Any] = {
        "rid": [ask.rid for ask in asks],
        "input_ids": [ask.input_ids for ask in asks],
        "sampling_params": [
            {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True, **_ordered(ask.order)} for ask in asks
        ],
        "return_logprob": [True for _ in asks],
        "logprob_start_len": [ask.start_len for ask in asks],
        "top_logprobs_num": [ask.num_top for ask in asks],
        "return_hidden_states": [ask.wants_hidden for ask in asks],
    }
    if any(ask.cache_key for ask in asks):
        payload["extra_key"] = [ask.cache_key for ask in asks]
    return payload


def _ordered(order: DrawOrder | None) -> dict[str, Any]:
    return {} if order is None else {"custom_params": custom_params(order)}


def report_payload(rid: str) -> dict[str, Any]:
    """The body of a POST that asks the plugin what it can do; one token, drawn."""
    order = DrawOrder(sampling=SamplingParams(), base_len=1, prompt_len=1, wants_report=True)
    params = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True, **_ordered(order)}
    return {"rid": [rid], "input_ids": [[0]], "sampling_params": [params]}


def read_report(answer: Answer) -> PluginReport | None:
    """What it answered; None if there is no plugin, or it does not draw."""
    entry = (answer.meta_info.breakeven or [None])[0]
    return entry.report if isinstance(entry, Drawn) else None


def drawn_ids(ask: Ask, answer: Answer) -> Drawn | None:
    """[K+1] ids the plugin drew, from position ``base_len`` on; None if the engine cut the drafts into two passes.

    Raises:
        PeerRefused: the plugin did not draw.
    """
    entry = (answer.meta_info.breakeven or [None])[0]
    if entry is None or len(answer.output_ids) != 1:
        raise PeerRefused("target_error", "the plugin in the engine did not draw as ordered")
    drawn = entry if isinstance(entry, Drawn) else Drawn()
    if len(drawn.ids) != ask.num_drafts or (drawn.ids and drawn.first != ask.base_len):
        return None
    return msgspec.structs.replace(drawn, first=ask.base_len, ids=(*drawn.ids, answer.output_ids[0]))


def output_logprob(answer: Answer) -> float:
    """Log-probability of the output token.

    Raises:
        PeerRefused: it is not in the reply.
    """
    own = (answer.meta_info.output_token_logprobs or [(None, 0, None)])[0][0]
    if own is None:
        raise PeerRefused("target_error", "the output token's log-probability is not in the reply")
    return own


def position_lists(ask: Ask, answer: Answer) -> list[TopList]:
    """[K+1] lists of the most likely ids, of the positions after the committed ids and after each draft.

    Raises:
        PeerRefused: the reply is not laid out as documented above.
    """
    meta = answer.meta_info
    k = ask.num_drafts
    lists: list[list[Listed] | None] = []
    if k:
        entries = meta.input_top_logprobs or []
        first = ask.base_len - ask.start_len
        expected = len(ask.input_ids) - ask.start_len
        if len(entries) != expected:
            raise PeerRefused("target_error", f"{len(entries)} input positions in the reply, expected {expected}")
        lists = entries[first : first + k]
    lists.append((meta.output_top_logprobs or [None])[0])
    return [_top_list(entry) for entry in lists]


def prompt_lists(ask: Ask, answer: Answer) -> list[tuple[tuple[int, float], TopList]]:
    """((id, logprob), most likely ids) of the input positions after ``start_len``; for echo."""
    meta = answer.meta_info
    own, tops = meta.input_token_logprobs or [], meta.input_top_logprobs or []
    if len(own) != len(ask.input_ids) - ask.start_len or len(tops) not in (0, len(own)):
        raise PeerRefused("target_error", f"{len(own)} input positions in the reply")
    return [
        ((token_id, logprob if logprob is not None else 0.0), _top_list(tops[i]) if tops else [])
        for i, (logprob, token_id, _) in enumerate(own)
        if i > 0
    ]


def stream_payload(
    rid: str,
    input_ids: list[int],
    params: SamplingParams,
    *,
    num_top: int | None,
    max_new_tokens: int,
    cache_key: str = "",
    order: DrawOrder | None = None,
) -> dict[str, Any]:
    """The body of a streaming POST /generate: plain decode by the engine with the request's own parameters.

    With an ``order`` the plugin draws, and the engine's own sampling is left neutral.
    """
    if order is not None:
        params = SamplingParams(temperature=0.0)
    sampling: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": params.temperature,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    neutral = SamplingParams()
    for name in ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        if getattr(params, name) != getattr(neutral, name):
            sampling[name] = getattr(params, name)
    if params.top_k > 0:
        sampling["top_k"] = params.top_k
    if params.logit_bias:
        sampling["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias}
    if params.min_new_tokens:
        # Held back are the engine's own EOS ids and these.
        sampling |= {"min_new_tokens": params.min_new_tokens, "stop_token_ids": list(params.eos_ids)}
    if params.grammar is not None:
        sampling[_GRAMMAR_FIELDS[params.grammar.kind]] = params.grammar.text
    sampling |= _ordered(order)
    payload: dict[str, Any] = {"rid": rid, "input_ids": input_ids, "sampling_params": sampling, "stream": True}
    if cache_key:
        payload["extra_key"] = cache_key
    if num_top is not None:
        payload |= {"return_logprob": True, "top_logprobs_num": num_top}
    return payload


def _top_list(entries: list[Listed] | None) -> TopList:
    if not entries:
        raise PeerRefused("target_error", "a position without its most likely ids in the reply")
    return [(token_id, logprob) for logprob, token_id, _ in entries if logprob is not None]
