"""Every call of the controller as a record, and the replay that makes a fresh controller decide the same again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from gateway.speculation.controller import Controller
from gateway.speculation.records import BucketReport, ControllerLimits, Override, RoundObserved, RoundPlan
from gateway.speculation.request_view import RequestView

__all__ = [
    "DrafterSet",
    "Mismatch",
    "RequestOpened",
    "RoundPlanned",
    "RoundSeen",
    "ShadowSeen",
    "TraceRecord",
    "TraceStarted",
    "TracedController",
    "replay",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStarted:
    """First record of a trace."""

    limits: ControllerLimits
    kind: Literal["start"] = "start"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSet:
    """Controller.set_drafter."""

    is_up: bool
    reason: str
    kind: Literal["drafter"] = "drafter"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOpened:
    """Controller.new_request. ``request``: its serial number."""

    request: int
    kind: Literal["open"] = "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlanned:
    """Controller.plan_round with its answer."""

    request: int
    batch_size: int
    max_draft_tokens: int
    context_len: int
    override: Override
    now_s: float
    plan: RoundPlan
    kind: Literal["plan"] = "plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSeen:
    """Controller.observe."""

    request: int
    round: RoundObserved
    kind: Literal["round"] = "round"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowSeen:
    """Controller.observe_shadow."""

    request: int
    batch_size: int
    num_draft_tokens: int
    num_accepted_tokens: int
    now_s: float
    kind: Literal["shadow"] = "shadow"


TraceRecord = TraceStarted | DrafterSet | RequestOpened | RoundPlanned | RoundSeen | ShadowSeen


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A decision that came out differently. ``index``: of the record in the trace."""

    index: int
    recorded: RoundPlan
    replayed: RoundPlan


class TracedController(Controller):
    """A controller that tells ``sink`` of every call.

    Args:
        sink: takes the records in order; must not raise.
    """

    def __init__(self, limits: ControllerLimits, sink: Callable[[TraceRecord], None]) -> None:
        super().__init__(limits)
        self._sink = sink
        sink(TraceStarted(limits=limits))

    def set_drafter(self, *, is_up: bool, reason: str) -> None:
        """See Controller."""
        super().set_drafter(is_up=is_up, reason=reason)
        self._sink(DrafterSet(is_up=is_up, reason=reason))

    def new_request(self) -> RequestView:
        """See Controller."""
        view = super().new_request()
        self._sink(RequestOpened(request=view.serial))
        return view

    def plan_round(
        self,
        request: RequestView,
        *,
        batch_size: int,
        max_draft_tokens: int,
        context_len: int,
        override: Override,
        now_s: float,
    ) -> RoundPlan:
        """See Controller."""
        plan = super().plan_round(
            request,
            batch_size=batch_size,
            max_draft_tokens=max_draft_tokens,
            context_len=context_len,
            override=override,
            now_s=now_s,
        )
        self._sink(
            RoundPlanned(
                request=request.serial,
                batch_size=batch_size,
                max_draft_tokens=max_draft_tokens,
                context_len=context_len,
                override=override,
                now_s=now_s,
                plan=plan,
            )
        )
        return plan

    def observe(self, request: RequestView, round_: RoundObserved) -> None:
        """See Controller."""
        super().observe(request, round_)
        self._sink(RoundSeen(request=request.serial, round=round_))

    def observe_shadow(
        self,
        request: RequestView,
        *,
        batch_size: int,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        now_s: float,
    ) -> None:
        """See Controller."""
        super().observe_shadow(
            request,
            batch_size=batch_size,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
            now_s=now_s,
        )
        self._sink(
            ShadowSeen(
                request=request.serial,
                batch_size=batch_size,
                num_draft_tokens=num_draft_tokens,
                num_accepted_tokens=num_accepted_tokens,
                now_s=now_s,
            )
        )


def replay(records: Iterable[TraceRecord]) -> tuple[list[Mismatch], list[BucketReport]]:
    """Make every recorded call again on a fresh controller.

    Returns:
        The decisions that came out differently (none, if the controller is the one that wrote the trace), and the
        reports at the end.

    Raises:
        ValueError: the trace does not begin with its start record, or names a request that was never opened.
    """
    run: _Replay | None = None
    mismatches: list[Mismatch] = []
    for index, record in enumerate(records):
        if isinstance(record, TraceStarted):
            run = _Replay(record.limits)
        elif run is None:
            raise ValueError("the trace does not begin with its start record")
        else:
            differing = run.apply(record)
            if differing is not None:
                mismatches.append(Mismatch(index=index, recorded=differing[0], replayed=differing[1]))
    return mismatches, [] if run is None else run.controller.reports()


class _Replay:
    def __init__(self, limits: ControllerLimits) -> None:
        self.controller = Controller(limits)
        self._views: dict[int, RequestView] = {}

    def apply(
        self, record: DrafterSet | RequestOpened | RoundPlanned | RoundSeen | ShadowSeen
    ) -> tuple[RoundPlan, RoundPlan] | None:
        """Make the call; (recorded, replayed) if a plan differs."""
        match record:
            case DrafterSet():
                self.controller.set_drafter(is_up=record.is_up, reason=record.reason)
            case RequestOpened():
                self._views[record.request] = self.controller.new_request()
            case RoundSeen():
                self.controller.observe(self._view(record.request), record.round)
            case ShadowSeen():
                self.controller.observe_shadow(
                    self._view(record.request),
                    batch_size=record.batch_size,
                    num_draft_tokens=record.num_draft_tokens,
                    num_accepted_tokens=record.num_accepted_tokens,
                    now_s=record.now_s,
                )
            case _:
                plan = self.controller.plan_round(
                    self._view(record.request),
                    batch_size=record.batch_size,
                    max_draft_tokens=record.max_draft_tokens,
                    context_len=record.context_len,
                    override=record.override,
                    now_s=record.now_s,
                )
                return None if plan == record.plan else (record.plan, plan)
        return None

    def _view(self, request: int) -> RequestView:
        view = self._views.get(request)
        if view is None:
            raise ValueError(f"request {request} was never opened")
        return view
