from __future__ import annotations

from gateway.speculation.bucket import Bucket
from gateway.speculation.bucket_table import BucketTable
from gateway.speculation.records import ControllerLimits


def table(**limits: object) -> BucketTable:
    made = BucketTable(ControllerLimits(**limits))  # type: ignore[arg-type]
    made.set_drafter(is_up=True, reason="up")
    return made


def measured(bucket: Bucket) -> Bucket:
    for _ in range(10):
        bucket.learn_cost(0, 0.01)
        bucket.learn_plain(0.01)
    return bucket


def test_one_bucket_for_each_batch_and_context_class():
    buckets = table()
    first = buckets.for_round(1, 100, 0.0)
    assert buckets.for_round(1, 500, 0.0) is first
    longer = buckets.for_round(1, 600, 0.0)
    assert (longer.batch, longer.context_class) == (1, 1)
    assert buckets.for_round(2, 100, 0.0).batch == 2


def test_load_that_swings_around_an_edge_does_not_flip_the_bucket():
    buckets = table()
    assert [buckets.for_round(n, 100, 0.0).batch for n in (4, 5, 4, 5, 6, 5, 4, 3)] == [4, 4, 4, 4, 8, 8, 8, 4]
    assert [buckets.for_round(n, 100, 0.0).batch for n in (2, 1, 2)] == [4, 1, 2]


def test_the_mean_context_of_a_batch_must_pass_the_edge_clearly():
    buckets = table()
    for _ in range(40):
        buckets.for_round(4, 500, 0.0)
    for _ in range(40):
        bucket = buckets.for_round(4, 560, 0.0)
    assert bucket.context_class == 0
    for _ in range(40):
        bucket = buckets.for_round(4, 900, 0.0)
    assert bucket.context_class == 1


def test_a_new_context_class_inherits_from_the_nearest():
    buckets = table()
    first = measured(buckets.for_round(1, 100, 0.0))
    first.gate.state = "OFF"
    second = buckets.for_round(1, 600, 1.0)
    assert (second.gate.state, second.plain_s) == ("OFF", 0.01)


def test_a_bucket_unused_for_long_probes_anew():
    buckets = table()
    bucket = buckets.for_round(1, 100, 0.0)
    bucket.lookout.probe_in_tokens = 2000.0
    buckets.for_round(1, 100, 200.0)
    assert bucket.lookout.probe_in_tokens == 2000.0
    buckets.for_round(1, 100, 301.0)
    assert bucket.lookout.probe_in_tokens == 128


def test_the_drafter_comes_and_goes():
    buckets = BucketTable(ControllerLimits())
    early = buckets.for_round(1, 100, 0.0)
    assert (early.gate.state, early.gate.reason) == ("FAULT", "not connected yet")
    buckets.set_drafter(is_up=True, reason="up")
    assert early.gate.state == "BASE"
    measured(early)
    buckets.set_drafter(is_up=False, reason="crashed")
    assert (early.gate.state, early.gate.reason) == ("FAULT", "crashed")
    buckets.set_drafter(is_up=True, reason="up")
    assert early.gate.state == "PROBE"
    buckets.set_drafter(is_up=True, reason="up")
    assert early.gate.state == "PROBE"


def test_a_pinned_mode_pins_every_bucket():
    buckets = table(mode="on")
    bucket = buckets.for_round(1, 100, 0.0)
    assert (bucket.gate.state, bucket.gate.reason) == ("PINNED", "mode is on")
    buckets.set_drafter(is_up=True, reason="up")
    assert bucket.gate.num_switches == 1


def test_the_newest_of_each_batch_and_the_smaller_neighbour():
    buckets = table()
    short = buckets.for_round(1, 100, 0.0)
    long = buckets.for_round(1, 600, 1.0)
    two = buckets.for_round(2, 100, 2.0)
    long.last_s = 5.0
    assert buckets.newest() == [long, two]
    short.last_s = 9.0
    assert buckets.newest() == [short, two]
    assert buckets.smaller(short) is None
    assert buckets.smaller(buckets.for_round(4, 5000, 0.0)) is None
