"""LangChain and LiteLLM, unmodified, in an environment of their own (about 150 MB: only where it is asked for)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import run_client
from tests.clients.scripted_engine import TEXT

pytestmark = [pytest.mark.clients, pytest.mark.slow]

SCRIPT = Path(__file__).parent / "python" / "check.py"
PACKAGES = ("langchain-openai==1.7.4", "litellm==1.110.2")
NUM_TOKENS = len(TEXT.encode())
CALLS = [["weather", "Paris"], ["weather", "Rome"]]


@pytest.fixture(scope="session")
def client_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment with both libraries."""
    given = os.environ.get("BREAKEVEN_CLIENT_PYTHON")
    if given:
        return given
    if os.environ.get("BREAKEVEN_CLIENT_SUITES") != "1":
        pytest.skip("set BREAKEVEN_CLIENT_SUITES=1 to install and run LangChain and LiteLLM")
    folder = tmp_path_factory.mktemp("clients") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES]
    done = subprocess.run(install, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.skip(f"pip install failed: {done.stderr[-300:]}")
    return python


async def test_langchain_and_litellm(client_python: str, base_url: str) -> None:
    seen = await run_client([client_python, str(SCRIPT)], cwd=SCRIPT.parent, base_url=base_url)
    assert seen["langchain"] == {
        "whole": TEXT,
        "streamed": TEXT,
        "finish": "stop",
        "usage": NUM_TOKENS,
        "calls": CALLS,
        "broken": "APIError",
    }
    expected = {"whole": TEXT, "streamed": TEXT, "usage": NUM_TOKENS, "calls": CALLS, "finish": "tool_calls"}
    assert seen["litellm"] == {"openai": expected, "hosted_vllm": expected}
