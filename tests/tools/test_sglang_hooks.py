"""What the plugin hooks stands in every supported version's recorded source, and a change would be noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.sglang_hooks import RECORDING, look_into, main, problems
from verifier.sglang.capabilities import TESTED_VERSIONS
from verifier.sglang.plugin.hooks import CAPABILITIES, TARGETS

RECORDED: dict[str, Any] = json.loads((Path(__file__).parents[2] / RECORDING).read_text())
SUPPORTED = [f"0.5.{patch}" for patch in range(17, 24)]


@pytest.mark.parametrize("version", SUPPORTED)
def test_every_target_field_and_route_is_there(version: str) -> None:
    found = RECORDED[version]
    assert set(found["targets"]) == set(TARGETS)
    assert problems({"version": version, **found}) == []


def test_versions_that_are_called_tested_are_recorded() -> None:
    assert set(TESTED_VERSIONS) <= set(RECORDED)
    tested = {text.split()[0] for target in TARGETS.values() for text in target.tested_on}
    assert tested <= set(RECORDED)


def test_capabilities_name_known_targets() -> None:
    used = {key for capability in CAPABILITIES for key in capability.targets}
    assert used == set(TARGETS)


def write(directory: Path, path: str, source: str) -> None:
    file = directory / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)


def test_what_is_gone_or_changed_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "sglang/_version.py", "__version__: str\n__version__ = version = '0.9.0'\n")
    worker = "class TpModelWorker:\n    def forward_batch_generation(self, job, *, extra=None): ...\n"
    write(tmp_path, "sglang/srt/managers/tp_worker.py", worker)
    base = "class BaseReq:\n    rid: str\n"
    own = "class GenerateReqInput(BaseReq):\n    def __init__(self):\n        self.stream = 1\n"
    write(tmp_path, "sglang/srt/managers/io_struct.py", base + own)
    found = look_into(tmp_path)
    assert found["version"] == "0.9.0"
    assert found["targets"]["forward"] == ["self", "job", "extra"]
    assert found["targets"]["sample"] is None
    wrong = problems(found)
    assert any("takes ('self', 'job', 'extra'), not ('self', 'batch')" in text for text in wrong)
    assert any("ModelRunner.sample is not there" in text for text in wrong)
    assert "sglang.srt.managers.io_struct.GenerateReqInput.input_ids" in found["missing"]
    assert "sglang.srt.managers.io_struct.GenerateReqInput.rid" not in found["missing"]
    assert "sglang.srt.managers.io_struct.GenerateReqInput.stream" not in found["missing"]
    with pytest.raises(SystemExit) as exit_info:
        main([str(tmp_path)])
    assert exit_info.value.code == 1
    assert f"SGLang 0.9.0: {len(found['targets'])} targets, not all there" in capsys.readouterr().out
