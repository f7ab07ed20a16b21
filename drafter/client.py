"""The gateway's end of the link to the drafter. Loads no torch.

``run`` receives; start it in the owner's TaskGroup before ``connect``. The process may die and come back at the same
endpoint: ``peer_lost`` fails what waits and drops what is queued for the dead one, ``connect`` starts again.
"""

from __future__ import annotations

import asyncio

from wire.errors import LinkOverflow, PeerLate, PeerRefused
from wire.messages import DraftClose, DraftExtend, DraftFailed, DraftProposal, DraftReplies, ToGateway
from wire.reconnecting import Pending, ReconnectingClient

__all__ = ["DrafterClient"]


class DrafterClient(ReconnectingClient):
    """Asks for drafts. All methods belong to one event loop.

    num_late_replies: replies that came after their caller had given up; dropped.
    last_draft_s, last_num_rows: of the newest DraftReplies.
    """

    def __init__(self, endpoint: str, *, role: str = "gateway") -> None:
        super().__init__(endpoint, peer="drafter", role=role, needs_welcome=True)
        self.num_late_replies = 0
        self.last_draft_s = 0.0
        self.last_num_rows = 0
        self._drafts: Pending[DraftProposal | DraftFailed] = Pending()

    async def extend(self, message: DraftExtend, *, timeout_s: float) -> DraftProposal:
        """Send and wait for the answer of this request and round.

        Raises:
            PeerLost: not connected, lost while waiting, or the queue is full.
            PeerLate: no answer within ``timeout_s``. PeerRefused: the drafter said why it can't; the code is one of
                those in DraftFailed.
        """
        key = (message.request_id, message.round_id)
        future = self._drafts.open(key)
        try:
            self._send(message)
            async with asyncio.timeout(timeout_s):
                answer = await future
        except TimeoutError:
            raise PeerLate(f"no draft within {timeout_s:g} s") from None
        finally:
            self._drafts.forget(key, future)
        if isinstance(answer, DraftFailed):
            raise PeerRefused(answer.code, answer.message)
        return answer

    def close(self, request_id: str) -> None:
        """The request is over. Best effort: a drafter that can't be told has a bound of its own."""
        if self._link is None or not self._is_welcome:
            return
        try:
            self._link.send(DraftClose(request_id=request_id))
        except LinkOverflow:
            return

    def _fail_waiting(self, reason: str) -> None:
        self._drafts.fail_all(reason)

    def _on_message(self, message: ToGateway) -> None:
        if not isinstance(message, DraftReplies):
            self._on_bad_message(f"unexpected {type(message).__name__}")
            return
        # One loop without awaits: all callers of a batch wake in the same turn of the event loop.
        for reply in message.replies:
            if not self._drafts.resolve((reply.request_id, reply.round_id), reply):
                self.num_late_replies += 1
        self.last_draft_s, self.last_num_rows = message.draft_s, message.num_rows
