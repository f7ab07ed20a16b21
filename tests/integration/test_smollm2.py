"""The real target with the shipped head: greedy text is identical with any draft length, over 200 prompts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.stack import Server, serving

HEAD = Path(__file__).parents[2] / "drafter" / "heads" / "smollm2-135m-instruct"
pytestmark = [
    pytest.mark.integration,
    pytest.mark.weights,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (HEAD / "config.json").exists(), reason="no trained head in the repository yet"),
]
SUBJECTS = ["the sea", "a bicycle", "bread", "winter", "the moon", "a library", "rain", "chess", "a cat", "tea"]
TEMPLATES = [
    "Write one sentence about {}.",
    "What is {}?",
    "List three facts about {}.",
    "Explain {} to a child.",
    "Write a short poem about {}.",
]
MOODS = ["", " Be brief.", " Answer in capital letters.", " Use an example."]
PROMPTS = [template.format(subject) + mood for mood in MOODS for template in TEMPLATES for subject in SUBJECTS]
DRAFT_LENGTHS = [1, 2, 3, 5, 8]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # The user's own cache: the conversion of the weights is paid once.
    with serving(
        tmp_path_factory.mktemp("smollm2"),
        model="smollm2-135m-instruct",
        head="smollm2-135m-instruct",
        model_name="smollm2",
        cache_dir=os.environ.get("BREAKEVEN_VERIFIER_CACHE_DIR", str(Path.home() / ".cache" / "breakeven")),
        speculation={"draft_timeout_s": 20.0},
    ) as running:
        yield running


def _answers(server: Server, prompts: list[str], k: int, **options: object) -> list[str]:
    def ask(numbered: tuple[int, str]) -> str:
        seed, prompt = numbered
        body = {
            "model": "smollm2",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 24,
            "seed": seed,
            "speculation": {"mode": "on", "num_draft_tokens": k} if k else {"mode": "off"},
            **options,
        }
        status, answer = server.post("/v1/chat/completions", json.dumps(body).encode())
        assert status == 200, answer
        text: str = answer["choices"][0]["message"]["content"]
        return text

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(ask, enumerate(prompts)))


def test_greedy_text_is_identical_for_200_prompts(server: Server) -> None:
    # Every prompt plain and with one draft length, every length on 40 prompts of all templates.
    assert len(PROMPTS) == len(set(PROMPTS)) == 200
    plain = _answers(server, PROMPTS, 0, temperature=0)
    assert len(set(plain)) > 150
    for index, k in enumerate(DRAFT_LENGTHS):
        chosen = slice(index, None, len(DRAFT_LENGTHS))
        assert _answers(server, PROMPTS[chosen], k, temperature=0) == plain[chosen], k
    speculation = server.stats()["speculation"]
    assert speculation["num_rounds"] > 500
    # A head that drafts nothing useful would pass everything above.
    assert speculation["acceptance_rate"] > 0.2


def test_sampled_text_is_identical(server: Server) -> None:
    options = {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.2,
    }
    prompts = PROMPTS[::9]
    plain = _answers(server, prompts, 0, **options)
    for k in (2, 5):
        assert _answers(server, prompts, k, **options) == plain, k
