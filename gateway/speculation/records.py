"""What goes into and comes out of the controller. Records only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gateway.speculation.costs import CostCell
from gateway.speculation.gate import GateState

__all__ = ["BucketReport", "ControllerLimits", "Override", "RoundObserved", "RoundPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """What the client asked for its own request.

    Fields:
        mode: auto: the controller decides. on: always draft. off: plain decode.
        num_draft_tokens: mode on: the K to use. mode auto: the most to use. None: no wish.
    """

    mode: Literal["auto", "on", "off"] = "auto"
    num_draft_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerLimits:
    """Constants of the policy. Evidence: docs/controller.md (simulator tables) unless another source is named.

    Fields:
        mode: auto decides; on and off pin every request that has no wish of its own.
        candidates: draft lengths tried, ascending, without 0. EAGLE-3 heads in the field reach acceptance lengths of
            2 to 3.5, so more than 8 has no use.
        default_num_draft_tokens: first K measured. Public EAGLE-3 configurations draft 3 tokens without a tree.
        margin: speculation must beat plain decode by this share to be turned on. A wrong off costs the gain, a wrong
            on is slower than no gateway; 3 % is what 16 rounds can resolve.
        base_rounds: plain rounds measured first: 8 tokens give the baseline to 9 % at a scatter of 25 %.
        probe_min_rounds, probe_max_rounds: a probe ends as soon as it is one standard error clear of its line, not
            before 4 rounds and at 16, where tokens that scatter by 60 % leave an error of 15 %.
        probe_loss_tokens: plain tokens of time that a probe may lose before it ends: 8 cost 0.3 % of the 2,700 plain
            tokens after which such a probe is repeated.
        bucket_loss_tokens: ON ends when the loss of a stream since its best moment exceeds so many plain tokens of
            time. At the tie, 1.3 tokens of scatter a round make a false alarm about once in (24 / 1.3)^2 = 340 rounds;
            With 20 (and 8 below) the founding case at length 2.46, speedup 1.13, had 4.6 % regret instead of 2.3.
        stay_odds, return_odds, switch_tokens: when a request's own gate changes (planning.py). Value iteration of the
            exact problem wants odds of about 3 and 1.8; with beliefs that are learnt 2.7 and 2.2 did best on seeds 0
            to 4. 0.1 tokens had 6 changes of state in 200 rounds at the tie, 0.2 has 0.2.
        hazard_per_token: chance that a text jumps to another level. Bursts, whose true rate is 1/115, alternating texts
            and the long answer with a bad middle had 4.0, 3.5 and 5.3 % regret with 1/115, 4.2, 2.9 and 2.6 with 1/200.
        mixture_half_life_tokens, mixture_prior_tokens: memory of what all requests' levels are, and the tokens that an
            even spread over the levels counts for beside it. 12,000 and 400 made no difference beyond the noise.
        probe_backoff_tokens, probe_backoff_max_tokens: plain tokens before a probe in the dark, doubling with each that
            failed. Atlas measured 256 and 1024 as the useful range.
        probe_budget: share of a plain stretch that a probe may be expected to lose where shadows say that it can't pay.
        refresh_tokens, refresh_rounds: 8 plain rounds in 1024 tokens keep the baseline fresh for 0.3 % (Atlas).
        explore_every_rounds: one round in so many may measure a K that has not run yet, or hardly.
        explore_gain: such a K must promise this much over the best measured one.
        shadow_max_interval_tokens: a shadow comes at least so often: at 4 % of a token each, which the simulator
            assumes, that is 0.1 % of plain decode.
        shadow_k: drafts of a shadow: 4 are scored sooner than 8 and say as much (bursts 4.0 instead of 4.2 % regret).
        shadow_budget: share of plain decode's speed that shadows may cost.
        shadow_min_cost_tokens: what a shadow is taken to cost where nothing can be measured, in plain tokens.
        shadow_half_life: shadows; memory of the speedup that they predict, which is only shown.
        bucket_half_life_rounds: memory of how acceptance falls with the draft position.
        rate_half_life_rounds: memory of the delivered rates, which are reported and which probes compare with.
        alarm_keep: share of its memory that an estimate keeps at a change alarm.
        is_monotone: where a smaller batch loses, a larger one starts OFF instead of probing. False for
            mixture-of-experts targets, where a few more rows load more experts (vLLM #32374).
        stale_after_s: a bucket not used for so long probes anew.
    """

    mode: Literal["auto", "on", "off"] = "auto"
    candidates: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8)
    default_num_draft_tokens: int = 3
    margin: float = 0.03
    base_rounds: int = 8
    probe_min_rounds: int = 4
    probe_max_rounds: int = 16
    probe_loss_tokens: float = 8.0
    bucket_loss_tokens: float = 24.0
    stay_odds: float = 2.7
    return_odds: float = 2.2
    switch_tokens: float = 0.2
    hazard_per_token: float = 1.0 / 200.0
    mixture_half_life_tokens: float = 6000.0
    mixture_prior_tokens: float = 150.0
    probe_backoff_tokens: int = 128
    probe_backoff_max_tokens: int = 2048
    probe_budget: float = 0.003
    refresh_tokens: int = 1024
    refresh_rounds: int = 8
    explore_every_rounds: int = 4
    explore_gain: float = 0.03
    shadow_max_interval_tokens: int = 48
    shadow_k: int = 4
    shadow_budget: float = 0.03
    shadow_min_cost_tokens: float = 0.03
    shadow_half_life: float = 20.0
    bucket_half_life_rounds: float = 300.0
    rate_half_life_rounds: float = 200.0
    alarm_keep: float = 0.15
    is_monotone: bool = True
    stale_after_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """K for the next round and why.

    is_shadow: run the round plain, fetch its features and have ``num_draft_tokens`` drafted beside the plain stream;
        tell ``observe_shadow`` how many of them came true.
    """

    num_draft_tokens: int
    reason: str
    is_shadow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundObserved:
    """One finished round of one request.

    Fields:
        batch_size: streams decoding when it was planned.
        num_draft_tokens: drafts that were verified; 0 for plain, re-sync and lost-draft rounds.
        num_accepted_tokens: of them.
        num_committed_tokens: delivered, after cutting at stops.
        round_s: wall time from the commit before to this commit.
        is_cut: ended by a stop or limit.
        is_clean: no prompt was computed in its pass and nothing was retried: its time is a fair sample.
        is_resync: drafts were planned, but the round ran plain to fetch the features the drafter lacks. What it took
            beyond a plain round is charged to speculation.
        is_draft_lost: drafts were planned, but the drafter was late or failed: the round ran plain and all that it took
            beyond a plain round is charged to speculation, clean or not.
        now_s: monotonic time of the commit.
    """

    batch_size: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_committed_tokens: int
    round_s: float
    is_cut: bool
    is_clean: bool
    is_resync: bool = False
    is_draft_lost: bool = False
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketReport:
    """What the controller knows and does for one batch bucket (its context class in use); for /stats.

    Fields:
        since_s: monotonic time of the last change of state. num_switches: changes of state so far.
        num_suspensions: requests taken off speculation on their own while the bucket stayed on.
        num_draft_tokens: K in use; 0 while plain.
        plain_s, round_costs: seconds of a plain round, and of a round by K.
        acceptance_length: expected tokens a round at ``num_draft_tokens`` (or the K that would be tried), >= 1.
        break_even_length: C(K) / t of that K. break_even_lengths: of every measured K.
        speedup, speedup_se: delivered rate over the plain rate (while plain: predicted), and its standard error.
        next_probe_in_tokens: plain tokens until the next probe is considered; None unless OFF.
    """

    batch_size: int
    context_class: int
    state: GateState
    reason: str
    since_s: float
    num_switches: int
    num_suspensions: int
    num_probes_won: int
    num_probes_lost: int
    num_shadows: int
    num_draft_tokens: int
    plain_s: float | None
    round_costs: dict[int, CostCell]
    acceptance_length: float | None
    break_even_length: float | None
    break_even_lengths: dict[int, float]
    speedup: float | None
    speedup_se: float | None
    next_probe_in_tokens: int | None
