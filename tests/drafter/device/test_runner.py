"""The device's runner on the CPU: stretches of every length, groups, bfloat16, what it leaves behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from drafter.device import attention
from drafter.device.graphs import GraphShape
from drafter.device.model import DeviceModel
from drafter.device.runner import DeviceRunner
from drafter.head.loader import load_head
from drafter.ports import DraftWish, Stretch
from tests.drafter.engine_rig import GREEDY, Rig, Story
from tests.drafter.heads import FEATURES, LAYOUTS, VOCAB, TinyHead
from wire.sampling import SamplingParams


def runner_of(
    tiny: TinyHead, *, dtype: torch.dtype = torch.float32, max_window_bytes: int = 1 << 30, uses_graphs: bool = False
) -> DeviceRunner:
    head = load_head(tiny.head_dir, target_model_dir=tiny.target_dir)
    model = DeviceModel(head, device=torch.device("cpu"), dtype=dtype, num_positions=4096)
    return DeviceRunner(model, max_window_bytes=max_window_bytes, uses_graphs=uses_graphs)


def stretch_of(runner: DeviceRunner, length: int, *, seed: int) -> Stretch:
    random = np.random.default_rng(seed)
    features = random.standard_normal((length, FEATURES)).astype(np.float32)
    return Stretch(cache=runner.new_cache(), features=features, token_ids=random.integers(0, VOCAB, length).tolist())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_long_stretches_of_every_layout(layout: str, tiny_heads: dict[str, TinyHead], tmp_path: Path) -> None:
    """More than 16 rows take the way of prompts."""
    rig, story, known = Rig(tiny_heads[layout], None, tmp_path / "ring", device="cpu"), Story("a", 120), 0
    for base_len in (40, 42, 100):
        assert rig.ids(story.message(rig.ring, base_len, start=known)) == [story.expected(rig.reference, base_len)]
        known = base_len
    rig.ring.close()


@pytest.mark.parametrize("layout", ["speculators", "latent attention"])
def test_sums_over_positions_in_pieces(
    layout: str, tiny_heads: dict[str, TinyHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for split in (64, 1 << 20):
        monkeypatch.setattr(attention, "SPLIT", split)
        runner = runner_of(tiny_heads[layout])
        wish = DraftWish(num_draft_tokens=5, position=301, sampling=GREEDY)
        found.append(runner.draft([stretch_of(runner, 300, seed=1), stretch_of(runner, 5, seed=2)], [wish, wish]))
    assert found[0] == found[1]


def test_groups_answer_in_the_order_of_the_requests(tiny_heads: dict[str, TinyHead]) -> None:
    wishes = [
        DraftWish(num_draft_tokens=count, position=100, sampling=sampling)
        for count, sampling in ((3, GREEDY), (1, SamplingParams(temperature=0.7, seed=3)), (5, GREEDY), (2, GREEDY))
    ]
    found = []
    for max_window_bytes in (1, 1 << 30):
        runner = runner_of(tiny_heads["speculators"], max_window_bytes=max_window_bytes)
        stretches = [stretch_of(runner, length, seed=length) for length in (4, 40, 300, 9)]
        found.append(runner.draft(stretches, wishes))
        assert [stretch.cache.length for stretch in stretches] == [4, 40, 300, 9]
    assert found[0] == found[1]
    assert [len(ids) for ids in found[0]] == [3, 1, 5, 2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16_is_near(layout: str, tiny_heads: dict[str, TinyHead]) -> None:
    """The same rows through rounded weights: states off by a few hundredths, not by another layout."""
    states = []
    for dtype in (torch.float32, torch.bfloat16):
        runner = runner_of(tiny_heads[layout], dtype=dtype)
        stretch = stretch_of(runner, 12, seed=5)
        cache = runner.new_cache()
        cache.reserve(16)
        with torch.inference_mode():
            given = runner._staging.send([stretch], [0], 12)
            states.append(runner._extend(given, cache.data.unsqueeze(2)).float())
    assert float((states[0] - states[1]).norm() / states[0].norm()) < 0.1


def test_rounds_in_fixed_buffers_are_the_same(tiny_heads: dict[str, TinyHead]) -> None:
    """What graphs repeat on a GPU: padded rows and positions, one buffer after another request's NaN."""
    wishes = [DraftWish(num_draft_tokens=3, position=100, sampling=GREEDY)] * 3
    found = []
    for uses_graphs in (False, True):
        runner = runner_of(tiny_heads["speculators, three qwen3 layers"], uses_graphs=uses_graphs)
        broken = stretch_of(runner, 500, seed=9)
        broken.features[:] = np.nan
        runner.draft([broken], wishes[:1])
        stretches = [stretch_of(runner, length, seed=length) for length in (3, 40, 6)]
        chains = runner.draft(stretches, wishes)
        again = [Stretch(cache=stretch.cache, features=stretch.features[:2], token_ids=(7, 8)) for stretch in stretches]
        found.append((chains, runner.draft(again, wishes)))
    assert found[0] == found[1]


def test_what_is_too_large_for_the_buffers_runs_without(tiny_heads: dict[str, TinyHead]) -> None:
    runner = runner_of(tiny_heads["speculators"], uses_graphs=True)
    graphs = runner._graphs
    assert graphs is not None
    shape = graphs.shape_for(lengths=[600, 3], counts=[3, 1], steps=5)
    assert shape == GraphShape(batch=2, rows=4, capacity=1024, steps=5)
    assert graphs.shape_for(lengths=[1 << 24], counts=[1], steps=1) is None
    assert graphs.shape_for(lengths=[10] * 100, counts=[2] * 100, steps=1) is None


def test_warming_up_leaves_nothing(tiny_heads: dict[str, TinyHead]) -> None:
    runner_of(tiny_heads["speculators"]).warm_up(4)
