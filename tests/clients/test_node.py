"""openai-node and the Vercel AI SDK, unmodified, in a node process of their own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import run_client
from tests.clients.scripted_engine import TEXT

pytestmark = [pytest.mark.clients, pytest.mark.slow]

SOURCE = Path(__file__).parent / "node"
NUM_TOKENS = len(TEXT.encode())


@pytest.fixture(scope="session")
def node_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages installed; skips where there is no node or no registry."""
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("node is not installed")
    folder = tmp_path_factory.mktemp("node")
    for name in ("package.json", "check.mjs"):
        shutil.copy(SOURCE / name, folder)
    install = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
    try:
        done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("npm install took too long")
    if done.returncode:
        pytest.skip(f"npm install failed: {done.stderr[-300:]}")
    return folder


async def test_node_clients(node_dir: Path, base_url: str) -> None:
    seen = await run_client(["node", "check.mjs"], cwd=node_dir, base_url=base_url)
    assert seen == {
        "whole": TEXT,
        "streamed": [TEXT, TEXT],
        "usage": 2 * NUM_TOKENS,
        "calls": [["weather", '{"city": "Paris"}'], ["weather", '{"city": "Rome"}']],
        "finish": "tool_calls",
        "error": [404, "model_not_found", "model"],
        "broken": "lost",
        "response": TEXT,
        "aiWhole": TEXT,
        "aiStreamed": TEXT,
        "aiUsage": NUM_TOKENS,
        "aiCalls": [["weather", "Paris"], ["weather", "Rome"]],
        "aiFinish": "tool-calls",
        "aiError": [404, "The model 'other' does not exist here; ser"[:40]],
    }
