"""The gateway's end of the embedded verifier. Loads neither torch nor numpy.

``run`` receives; start it in the owner's TaskGroup before ``connect``. The process may die and come back at the same
endpoint: ``peer_lost`` fails what waits, ``connect`` opens a fresh link, so nothing queued for the dead one is sent.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from wire.errors import PeerLate, PeerLost
from wire.messages import (
    CloseRequest,
    ToGateway,
    VerifyBatch,
    VerifyFailed,
    VerifyItem,
    VerifyReply,
    VerifyResult,
)
from wire.reconnecting import ReconnectingClient
from wire.sampling import SamplingParams

__all__ = ["EmbeddedVerifierClient"]

log = structlog.get_logger("gateway.verifier")


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    pending: set[tuple[str, int]]
    done: asyncio.Future[VerifyReply]
    results: list[VerifyResult | VerifyFailed] = field(default_factory=list)
    last: VerifyReply | None = None

    def finish_if_complete(self) -> None:
        if self.pending or self.done.done():
            return
        last = self.last
        self.done.set_result(
            VerifyReply(
                results=tuple(self.results),
                forward_s=last.forward_s if last else 0.0,
                num_rows=last.num_rows if last else 0,
                num_prefill_rows=last.num_prefill_rows if last else 0,
                num_forwards=last.num_forwards if last else 0,
            )
        )


class EmbeddedVerifierClient(ReconnectingClient):
    """Sends verify batches, matches replies to them. All methods belong to one event loop.

    Every call is answered: by its results, or by a PeerError when the peer is declared lost or the time is up.
    num_stale_replies: results nobody waited for any more.
    """

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint, peer="verifier", role="gateway", needs_welcome=False)
        self.num_stale_replies = 0
        self._batch_ids = itertools.count()
        self._calls: dict[tuple[str, int], _Call] = {}

    @property
    def mixes_plain_rounds(self) -> bool:
        """One pass takes both."""
        return True

    def can_verify(self, sampling: SamplingParams) -> str | None:
        """Always None: every sampling parameter is applied at every draft position."""
        return None

    async def verify(self, items: Sequence[VerifyItem], *, timeout_s: float) -> VerifyReply:
        """Verify items in one batch and wait until all are answered.

        Returns:
            One result per item, in no particular order, without items closed meanwhile; times and row counts are
            those of the last pass involved.

        Raises:
            PeerLost, PeerLate: the peer is gone, or too slow.
        """
        keys = {(item.request_id, item.round_id) for item in items}
        call = _Call(pending=keys.copy(), done=asyncio.get_running_loop().create_future())
        for key in keys:
            self._calls[key] = call
        try:
            self._send(VerifyBatch(batch_id=next(self._batch_ids), items=tuple(items)))
            async with asyncio.timeout(timeout_s):
                return await call.done
        except TimeoutError:
            raise PeerLate(f"no answer within {timeout_s:g} s") from None
        finally:
            for key in keys:
                self._calls.pop(key, None)

    def close_request(self, request_id: str) -> None:
        """Tell the verifier to forget a request; never waits. A call that still waits for it goes on without it."""
        for (owner, round_id), call in list(self._calls.items()):
            if owner == request_id:
                call.pending.discard((owner, round_id))
                call.finish_if_complete()
        try:
            self._send(CloseRequest(request_id=request_id))
        except PeerLost as error:
            log.debug("close not sent", error=str(error))

    def close(self) -> None:
        """Close the link for good."""
        self.peer_lost("closing")

    def _fail_waiting(self, reason: str) -> None:
        for call in {id(call): call for call in self._calls.values()}.values():
            if not call.done.done():
                call.done.set_exception(PeerLost(reason))

    def _on_message(self, message: ToGateway) -> None:
        if isinstance(message, VerifyReply):
            self._on_reply(message)
        else:
            self._on_bad_message(f"unexpected {type(message).__name__}")

    def _on_bad_message(self, reason: str) -> None:
        super()._on_bad_message(reason)
        log.warning("malformed reply dropped", error=reason)

    def _on_reply(self, reply: VerifyReply) -> None:
        touched: list[_Call] = []
        for result in reply.results:
            key = (result.request_id, result.round_id)
            call = self._calls.get(key)
            if call is None or key not in call.pending:
                self.num_stale_replies += 1
                continue
            call.pending.discard(key)
            call.results.append(result)
            call.last = reply
            touched.append(call)
        for call in touched:
            call.finish_if_complete()
