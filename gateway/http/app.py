"""Puts the HTTP edge together: routes, middleware, and the server settings a gateway needs."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.config import GatewayConfig
from gateway.edge_counters import EdgeCounters
from gateway.http import (
    chat,
    completions,
    dashboard,
    health,
    models,
    openapi,
    responses,
    stats,
    stored_responses,
    tokenize,
)
from gateway.http.auth import require_api_key
from gateway.http.background import BackgroundJobs
from gateway.http.edge import EDGE, Edge
from gateway.http.key_limits import KeyLimits
from gateway.http.key_ring import KeyRing
from gateway.http.middleware import answer_errors, set_headers
from gateway.http.rate_limit import limit_requests
from gateway.http.request_trace import SpanExporter, trace_requests
from gateway.http.response_store import ResponseStore
from gateway.http.runner import JsonErrorRunner
from gateway.ports import Engine, TextCodec

__all__ = ["create_app", "create_runner", "start_server"]


def create_app(
    engine: Engine, codec: TextCodec, config: GatewayConfig, *, spans: SpanExporter | None = None
) -> web.Application:
    """The application; it starts nothing by itself.

    Args:
        engine: generates; may still be loading.
        codec: the target's tokenizer and chat template.
        spans: gets one span for each request that generates.
    """
    middlewares: list[Middleware] = [answer_errors, require_api_key, limit_requests]
    if spans is not None:
        middlewares.insert(0, trace_requests(spans))
    app = web.Application(client_max_size=config.max_body_bytes, middlewares=middlewares)
    jobs = BackgroundJobs()
    app[EDGE] = Edge(
        engine=engine,
        codec=codec,
        config=config,
        counters=EdgeCounters(),
        keys=KeyRing(config.all_api_keys()),
        limits=KeyLimits(max_running=config.max_running_per_key, max_per_minute=config.max_requests_per_minute),
        responses=ResponseStore(
            max_responses=config.max_stored_responses,
            max_bytes=config.max_stored_bytes,
            ttl_s=config.stored_response_ttl_s,
        ),
        jobs=jobs,
    )
    app.cleanup_ctx.append(jobs.context)
    app.on_response_prepare.append(set_headers)
    for module in (chat, completions, models, health, openapi, responses, stats, stored_responses, tokenize):
        app.add_routes(module.routes)
    app.add_routes(dashboard.routes(dashboard.load_page()))
    return app


def create_runner(app: web.Application, *, shutdown_timeout_s: float = 5.0) -> web.AppRunner:
    """The runner: a handler is cancelled as soon as its client leaves, and no access log is written.

    Args:
        shutdown_timeout_s: how long open requests may take after the listener has closed.
    """
    return JsonErrorRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout_s)


async def start_server(app: web.Application, config: GatewayConfig) -> web.AppRunner:
    """Listen on the configured address; ``runner.addresses`` says where, ``await runner.cleanup()`` ends it.

    Raises:
        OSError: the address is taken.
    """
    runner = create_runner(app)
    await runner.setup()
    await web.TCPSite(runner, config.host, config.port).start()
    return runner
