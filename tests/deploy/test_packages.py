"""Wheel and sdist: complete, alike, and enough to run outside the checkout."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from breakeven import __version__
from tests.deploy.compose_file import ROOT
from tests.deploy.packages import Built
from tests.integration.stack import Server

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(240)]


def _contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(built: Built) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = [name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]]
    listed = subprocess.run(["git", "ls-files", *packages], cwd=ROOT, capture_output=True, text=True, check=True)
    kept = {name for name in _contents(built.wheel) if ".dist-info/" not in name}
    assert kept == set(listed.stdout.split())
    assert {"cpukernels/rowwise.c", "gateway/http/static/index.html", "configs/profile.schema.json"} <= kept


def test_the_sdist_builds_the_same_wheel(built: Built) -> None:
    assert built.wheel.name == built.wheel_from_sdist.name == f"breakeven-{__version__}-py3-none-any.whl"
    assert _contents(built.wheel) == _contents(built.wheel_from_sdist)


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``bin`` of a fresh environment with the wheel in it; third-party packages are this environment's."""
    root = tmp_path_factory.mktemp("installed")
    venv.create(root, with_pip=False, symlinks=True)
    python = root / "bin" / "python"
    options = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(built.wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # A bare path: the .pth files there, an editable install among them, are not read.
    (site,) = root.glob("lib/python*/site-packages")
    (site / "third-party.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return root / "bin"


def _environ() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BREAKEVEN_", "PYTHON"))}
    return {**kept, "OMP_NUM_THREADS": "1"}


def _say(installed: Path, cwd: Path, *words: str) -> str:
    done = subprocess.run(words, cwd=cwd, env=_environ(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_installed_program_is_the_wheels(installed: Path, tmp_path: Path) -> None:
    assert _say(installed, tmp_path, str(installed / "breakeven"), "version").strip() == __version__
    code = "import gateway, configs; print(gateway.__file__, configs.__file__)"
    for path in _say(installed, tmp_path, str(installed / "python"), "-c", code).split():
        assert Path(path).is_relative_to(installed.parent)
    schema = _say(installed, tmp_path, str(installed / "breakeven"), "config", "schema")
    assert schema == (ROOT / "configs" / "profile.schema.json").read_text(encoding="utf-8")


@pytest.mark.weights
def test_doctor_and_an_answer_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    report = _say(installed, tmp_path, str(installed / "breakeven"), "doctor", "--gateway.port", port)
    assert "row-invariant" in report
    log_path = tmp_path / "serve.log"
    with log_path.open("wb") as log:
        command = [str(installed / "breakeven"), "serve", "--gateway.port", port]
        process = subprocess.Popen(command, cwd=tmp_path, env=_environ(), stdout=log, stderr=subprocess.STDOUT)
    server = Server(process, f"http://127.0.0.1:{port}", log_path, "smollm2-135m-instruct")
    try:
        server.wait_for("drafter")
        messages = b'[{"role": "user", "content": "What is the capital of France?"}]'
        body = b'{"model": "smollm2-135m-instruct", "temperature": 0, "max_tokens": 16, "messages": ' + messages + b"}"
        status, answer = server.post("/v1/chat/completions", body)
        assert status == 200, answer
        assert "Paris" in answer["choices"][0]["message"]["content"]
        process.terminate()
        assert process.wait(30) == 0, server.log()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
