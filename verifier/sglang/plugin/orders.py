"""How the gateway orders draws from the plugin, and what comes back in the engine's own reply.

The order travels in ``sampling_params.custom_params`` of a request, as one JSON text; SGLang hands it on unread. The
answer travels in ``meta_info`` under the same name, one entry for each output token, which is SGLang's customized_info.
So both work over any distance, arrive with the reply, and need no file, socket or patch of their own.
"""

from __future__ import annotations

from typing import Any

import msgspec

from wire.sampling import SamplingParams

__all__ = ["ORDER_NAME", "ORDER_VERSION", "DrawOrder", "Drawn", "PluginReport", "custom_params", "read_order"]

ORDER_NAME = "breakeven"
# An order of another version is not followed, and not answered.
ORDER_VERSION = 1


class DrawOrder(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What to draw for one engine request.

    Fields:
        sampling: how, by the order of steps in verifier/embedded/sampling.py; without a grammar.
        base_len: ids of the input that are committed; the others are drafts, and the target's id at each of their
            positions is drawn, like that of every output token.
        prompt_len: ids from here on count as output.
        wants_logprobs: also the log-probabilities of the ids drawn at draft positions, under the raw logits.
        wants_report: also say what the plugin can do.
    """

    sampling: SamplingParams
    base_len: int
    prompt_len: int
    wants_logprobs: bool = False
    wants_report: bool = False
    version: int = ORDER_VERSION


class PluginReport(msgspec.Struct, frozen=True, kw_only=True):
    """Which capabilities of the plugin are on, and why the others are off."""

    on: tuple[str, ...] = ()
    off: dict[str, str] = {}


class Drawn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was drawn in the pass that made an output token. That token itself was drawn too, and is in output_ids.

    Fields:
        first: position of ids[0]. ids: the target's ids at the draft positions, in order.
        logprobs: one for each id, if they were ordered. is_expanded: the pass ran as decode rows.
    """

    first: int = 0
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    is_expanded: bool = False
    report: PluginReport | None = None


_DECODER = msgspec.json.Decoder(DrawOrder)


def custom_params(order: DrawOrder) -> dict[str, str]:
    """The order as a request carries it."""
    return {ORDER_NAME: msgspec.json.encode(order).decode()}


def read_order(params: Any) -> DrawOrder | None:
    """The order in a request's custom_params; None if there is none, or one of another version.

    Raises:
        msgspec.MsgspecError: it can't be read.
    """
    text = params.get(ORDER_NAME) if isinstance(params, dict) else None
    if not isinstance(text, str):
        return None
    order = _DECODER.decode(text)
    return order if order.version == ORDER_VERSION else None
