"""The device's implementation on a real GPU; everything here is skipped without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from drafter.device.model import DeviceModel
from drafter.device.opening import open_device
from drafter.device.runner import DeviceRunner
from drafter.errors import OutOfDeviceMemory
from drafter.head.loader import load_head
from drafter.ports import DraftWish, Stretch
from tests.drafter.engine_rig import Rig, Story
from tests.drafter.heads import FEATURES, LAYOUTS, VOCAB, TinyHead
from wire.sampling import SamplingParams
from wire.settings import ConfigError

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return open_device("cuda:0")


@pytest.fixture(scope="module")
def tiny_heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyHead]:
    return {name: write(tmp_path_factory.mktemp("head")) for name, write in LAYOUTS.items()}


@pytest.fixture
def exact() -> Iterator[None]:
    """float32 products without TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("exact")
def test_float32_is_the_reference(
    layout: str, gpu: torch.device, tiny_heads: dict[str, TinyHead], tmp_path: Path
) -> None:
    """Every layout, a long first stretch, short ones, a batch of different lengths."""
    rig = Rig(tiny_heads[layout], None, tmp_path / "ring", device=str(gpu))
    story, known = Story("a", 80), 0
    for base_len in (40, 41, 45, 70):
        assert rig.ids(story.message(rig.ring, base_len, start=known)) == [story.expected(rig.reference, base_len)]
        known = base_len
    others = [Story(name, 60, seed=index) for index, name in enumerate("bcde")]
    lengths = (3, 17, 40, 59)
    messages = [other.message(rig.ring, length) for other, length in zip(others, lengths, strict=True)]
    expected = [other.expected(rig.reference, length) for other, length in zip(others, lengths, strict=True)]
    assert rig.ids(*messages) == expected
    rig.ring.close()


def _states(model: DeviceModel, num_slots: int, *, seed: int) -> torch.Tensor:  # [1, draft vocab]
    """Logits after a stretch that is read as a prompt and one that is read as rows."""
    random = np.random.default_rng(seed)
    features = random.standard_normal((num_slots, FEATURES)).astype(np.float32)
    ids = random.integers(0, VOCAB, num_slots).tolist()
    runner = DeviceRunner(model)
    cache = runner.new_cache()
    runner.read(Stretch(cache=cache, features=features[:-3], token_ids=ids[:-3]))
    given = runner._staging.send([Stretch(cache=cache, features=features[-3:], token_ids=ids[-3:])], [cache.length], 3)
    cache.reserve(num_slots + 16)
    return model.guess(runner._extend(given, cache.data.unsqueeze(2)))[0].float()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16_is_near(layout: str, gpu: torch.device, tiny_heads: dict[str, TinyHead]) -> None:
    """Logits within what three rounded layers of a random head lose; a wrong layout would be off by their size."""
    tiny = tiny_heads[layout]
    head = load_head(tiny.head_dir, target_model_dir=tiny.target_dir)
    with torch.inference_mode():
        wide = _states(DeviceModel(head, device=gpu, dtype=torch.float32, num_positions=256), 90, seed=1)
        near = _states(DeviceModel(head, device=gpu, dtype=torch.bfloat16, num_positions=256), 90, seed=1)
    assert float((wide - near).norm() / wide.norm()) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["speculators", "latent attention"])
def test_long_contexts(layout: str, gpu: torch.device, tiny_heads: dict[str, TinyHead]) -> None:
    """6,000 positions in pieces, then rows, whose sums are cut into pieces there; float32 on the CPU agrees."""
    tiny = tiny_heads[layout]
    head = load_head(tiny.head_dir, target_model_dir=tiny.target_dir)
    random = np.random.default_rng(2)
    num_slots = 6000
    features = random.standard_normal((num_slots, FEATURES)).astype(np.float32)
    ids = random.integers(0, VOCAB, num_slots).tolist()
    found = []
    with torch.inference_mode():
        for device in (gpu, torch.device("cpu")):
            runner = DeviceRunner(DeviceModel(head, device=device, dtype=torch.float32, num_positions=8192))
            cache = runner.new_cache()
            for begin in range(0, num_slots - 3, 1000):
                end = min(begin + 1000, num_slots - 3)
                runner.read(Stretch(cache=cache, features=features[begin:end], token_ids=ids[begin:end]))
            rest = Stretch(cache=cache, features=features[-3:], token_ids=ids[-3:])
            wish = DraftWish(num_draft_tokens=5, position=num_slots + 1, sampling=GREEDY)
            found.append(runner.draft([rest], [wish]))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("exact")
def test_captured_rounds_are_the_same(layout: str, gpu: torch.device, tiny_heads: dict[str, TinyHead]) -> None:
    """The fourth round of a shape is a graph's; rounds of another shape between them do not disturb it."""
    tiny = tiny_heads[layout]
    head = load_head(tiny.head_dir, target_model_dir=tiny.target_dir)
    found = []
    with torch.inference_mode():
        for uses_graphs in (False, True):
            model = DeviceModel(head, device=gpu, dtype=torch.float32, num_positions=1024)
            runner = DeviceRunner(model, uses_graphs=uses_graphs)
            random, chains = np.random.default_rng(3), []
            caches = [runner.new_cache() for _ in range(3)]
            wish = DraftWish(num_draft_tokens=4, position=9, sampling=GREEDY)
            for _ in range(12):
                for batch in (3, 1):
                    stretches = [
                        Stretch(
                            cache=cache,
                            features=random.standard_normal((count, FEATURES)).astype(np.float32),
                            token_ids=random.integers(0, VOCAB, count).tolist(),
                        )
                        for cache, count in zip(caches[:batch], (3, 4, 2), strict=False)
                    ]
                    chains.append(runner.draft(stretches, [wish] * batch))
            found.append(chains)
            assert runner._graphs is None or runner._graphs.num_graphs == 2
    assert found[0] == found[1]


@pytest.mark.slow
def test_sampled_requests_beside_greedy_ones(
    gpu: torch.device, tiny_heads: dict[str, TinyHead], tmp_path: Path
) -> None:
    """float32 on the GPU and on the CPU choose the same, with the target's noise."""
    found = []
    for device in (str(gpu), "cpu"):
        rig = Rig(tiny_heads["speculators"], None, tmp_path / device, device=device)
        sampled = Story("a", 40).message(rig.ring, 20, sampling=SamplingParams(temperature=0.8, seed=4))
        found.append(rig.ids(sampled, Story("b", 40).message(rig.ring, 30)))
        rig.ring.close()
    assert found[0] == found[1]


@pytest.mark.slow
def test_out_of_memory_fails_the_batch_and_leaves_the_process_well(
    gpu: torch.device, tiny_heads: dict[str, TinyHead], tmp_path: Path
) -> None:
    rig, story = Rig(tiny_heads["speculators"], None, tmp_path / "ring", device=str(gpu)), Story("a", 40)
    assert rig.ids(story.message(rig.ring, 10)) == [story.expected(rig.reference, 10)]
    runner = rig.runner
    assert isinstance(runner, DeviceRunner)
    cache = runner.new_cache()
    cache.length = 1 << 40
    wish = DraftWish(num_draft_tokens=1, position=2, sampling=GREEDY)
    with pytest.raises(OutOfDeviceMemory):
        runner.draft([Stretch(cache=cache, features=np.zeros((1, FEATURES), np.float32), token_ids=(1,))], [wish])
    assert rig.ids(story.message(rig.ring, 12, start=10)) == [story.expected(rig.reference, 12)]
    rig.ring.close()


def test_a_gpu_that_is_not_there(gpu: torch.device) -> None:
    with pytest.raises(ConfigError, match="the last one is cuda:"):
        open_device("cuda:63")
