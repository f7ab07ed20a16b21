"""What every handler of the application needs, under one key."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from gateway.config import GatewayConfig
from gateway.edge_counters import EdgeCounters
from gateway.errors import NotReady
from gateway.http.background import BackgroundJobs
from gateway.http.key_limits import KeyLimits
from gateway.http.key_ring import KeyRing
from gateway.http.response_store import ResponseStore
from gateway.openai.requests import RequestRules
from gateway.ports import Engine, TextCodec

__all__ = ["EDGE", "Edge", "request_rules"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """The application's parts. The engine generates, the codec turns text into ids, the rest is the edge's own."""

    engine: Engine
    codec: TextCodec
    config: GatewayConfig
    counters: EdgeCounters
    keys: KeyRing
    limits: KeyLimits
    responses: ResponseStore
    jobs: BackgroundJobs


EDGE = web.AppKey("edge", Edge)

_LOADING_RETRY_S = 2.0


def request_rules(request: web.Request) -> RequestRules:
    """What this request's body is checked against. Ask after the body has been read: the model may load meanwhile.

    Raises:
        NotReady: the model's sizes are not known yet, so nothing can be checked.
    """
    edge = request.app[EDGE]
    card = edge.engine.model_card()
    if not (card.vocab_size and card.context_len):
        phase = edge.engine.load_phase().phase
        raise NotReady(f"The model is not ready yet: {phase}.", retry_after_s=_LOADING_RETRY_S)
    return RequestRules(
        config=edge.config,
        card=card,
        speculation_header=request.headers.get("x-speculation"),
    )
