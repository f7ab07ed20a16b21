"""Registering with a fake SGLang: what is wanted, there and unchanged is on; what is not is off, and said."""

from __future__ import annotations

import gc
import inspect
import logging
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.verifier.sglang.toy_passes import ToyRequest, mode
from verifier.sglang.plugin import hooks
from verifier.sglang.plugin.config import PluginConfig, plugin_environ, read_plugin_config
from verifier.sglang.plugin.orders import DrawOrder, custom_params
from wire.sampling import SamplingParams


class FakeSGLang:
    """Modules made on demand, and SGLang's registry with what was registered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: str = "0.5.23") -> None:
        self._monkeypatch = monkeypatch
        self.registered: dict[str, tuple[str, Callable[..., Any]]] = {}
        for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
            monkeypatch.delitem(sys.modules, name)
        self.module("sglang").__version__ = version  # type: ignore[attr-defined]
        registry = self.module("sglang.srt.plugins.hook_registry")
        registry.HookType = {  # type: ignore[attr-defined]
            kind: kind.lower() for kind in ("BEFORE", "AFTER", "AROUND", "REPLACE")
        }
        registry.HookRegistry = SimpleNamespace(register=self._register)  # type: ignore[attr-defined]

    def _register(self, target: str, hook: Callable[..., Any], kind: str) -> None:
        assert target not in self.registered, "SGLang warns of several hooks on one target"
        self.registered[target] = (kind, hook)

    def module(self, name: str) -> types.ModuleType:
        parent, _, last = name.rpartition(".")
        if name not in sys.modules:
            made = types.ModuleType(name)
            made.__path__ = []
            self._monkeypatch.setitem(sys.modules, name, made)
            if parent:
                setattr(self.module(parent), last, made)
        return sys.modules[name]

    def add(self, key: str, function: Callable[..., Any] | None = None) -> None:
        """Put a target where SGLang has it; by default one with just the parameters we need."""
        target = hooks.TARGETS[key]
        parts = target.path.split(".")
        at = next((i for i, part in enumerate(parts) if part[0].isupper()), len(parts) - 1)
        owner: Any = self.module(".".join(parts[:at]))
        for name in parts[at:-1]:
            if not hasattr(owner, name):
                setattr(owner, name, type(name, (), {}))
            owner = getattr(owner, name)
        setattr(owner, parts[-1], function or _with(target.parameters, target.keywords))

    def add_all(self) -> None:
        for key in hooks.TARGETS:
            self.add(key)


def _with(parameters: tuple[str, ...], keywords: tuple[str, ...]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> None:
        return None

    made = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in parameters]
    made += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in keywords]
    function.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
    return function


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSGLang:
    return FakeSGLang(monkeypatch)


def wanted(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    for name, value in plugin_environ(PluginConfig(**fields)):
        monkeypatch.setenv(name, value)


def keys(fake: FakeSGLang) -> set[str]:
    return {key for key, target in hooks.TARGETS.items() if target.path in fake.registered}


def test_the_environment_says_what_the_config_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert read_plugin_config() == PluginConfig()
    config = PluginConfig(
        ring_path=tmp_path / "ring",
        socket_path=tmp_path / "socket",
        draws_target_ids=True,
        captures_aux=True,
        keeps_graph_inputs=False,
        all_reduce="a:b",
        lane_endpoint="ipc:///somewhere",
    )
    for name, value in plugin_environ(config):
        monkeypatch.setenv(name, value)
    assert read_plugin_config() == config


def test_nothing_is_hooked_unasked(fake: FakeSGLang) -> None:
    fake.add_all()
    hooks.register()
    assert keys(fake) == set()


def test_everything_at_once_is_one_hook_a_target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeSGLang(monkeypatch, version="0.5.17")
    fake.add_all()
    wanted(
        monkeypatch,
        ring_path=tmp_path / "ring",
        socket_path=tmp_path / "socket",
        draws_target_ids=True,
        captures_aux=True,
        all_reduce="a:b",
        lane_endpoint="ipc:///somewhere",
    )
    hooks.register()
    assert keys(fake) == set(hooks.TARGETS)
    assert {kind for kind, _ in fake.registered.values()} == {"before", "around", "after", "replace"}
    assert PluginConfig(lane_endpoint="ipc:///somewhere").is_used


def test_spare_decodes_are_left_out_where_the_version_does_not_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted(monkeypatch, lane_endpoint="ipc:///somewhere")
    for version, is_ours in (("0.5.21", True), ("0.5.22", False)):
        fake = FakeSGLang(monkeypatch, version=version)
        fake.add_all()
        hooks.register()
        assert ("running_batch" in keys(fake)) == is_ours


@pytest.mark.parametrize(("key", "function"), [("sample", None), ("sample", lambda self, something: None)])
def test_a_capability_without_one_of_its_targets_is_off_and_the_others_are_on(
    fake: FakeSGLang,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    key: str,
    function: Any,
) -> None:
    for other in hooks.TARGETS:
        if other != key:
            fake.add(other)
    if function is not None:
        fake.add(key, function)
    wanted(monkeypatch, ring_path=tmp_path / "ring", socket_path=tmp_path / "socket", draws_target_ids=True)
    with caplog.at_level(logging.WARNING):
        hooks.register()
    assert keys(fake) == {"forward", "graph_inputs", "tree_cache", "batch_result"}
    assert "target_ids is off: sglang.srt.model_executor.model_runner.ModelRunner.sample" in caplog.text


def test_a_capability_that_is_off_is_in_the_report(fake: FakeSGLang, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("forward", "input_logprobs", "sample"):
        fake.add(key)
    wanted(monkeypatch, draws_target_ids=True, captures_aux=True, keeps_graph_inputs=False)
    hooks.register()
    order = DrawOrder(sampling=SamplingParams(temperature=0.0), base_len=1, prompt_len=1, wants_report=True)
    request = ToyRequest("a", [0], custom_params(order))
    batch = SimpleNamespace(reqs=[request], forward_mode=mode("extend"), prefix_lens=[0], extend_lens=[1])
    output = SimpleNamespace(next_token_logits=torch.zeros(1, 4), next_token_logprobs=None, customized_info=None)
    forward_batch = SimpleNamespace(rids=["a"], forward_mode=batch.forward_mode, input_ids=torch.zeros(1))
    sample = fake.registered[hooks.TARGETS["sample"].path][1]

    def run(worker: Any, given: Any) -> Any:
        sample(lambda runner, *args: torch.zeros(1, dtype=torch.int64), None, output, forward_batch)
        return SimpleNamespace(logits_output=output)

    fake.registered[hooks.TARGETS["forward"].path][1](run, None, batch)
    report = output.customized_info["breakeven"][0].copy()["report"]
    assert report["on"] == ("target_ids",)
    assert "spec_aux_hidden_state" in report["off"]["aux_capture"]


def test_a_capability_that_finds_nothing_to_do_is_off_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    report = hooks.LiveReport()
    report.on += ["target_ids", "merged_rounds"]
    made = next(c for c in hooks.CAPABILITIES if c.name == "merged_rounds").make(PluginConfig(), hooks.Shared(report))
    context = SimpleNamespace(params=SimpleNamespace(enable_kv_cache_events=False, eviction_policy="lru"))
    tree = SimpleNamespace(insert=lambda: None)
    with caplog.at_level(logging.WARNING):
        assert made["tree_cache"](tree, context) is tree
    assert report().on == ("target_ids",)
    assert report().off == {"merged_rounds": "the prefix tree is a types.SimpleNamespace"}
    assert "merged_rounds is off" in caplog.text


def test_hooks_of_one_target_run_one_around_the_other(
    fake: FakeSGLang, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake.add_all()
    wanted(monkeypatch, ring_path=tmp_path / "ring", socket_path=tmp_path / "socket", draws_target_ids=True)
    hooks.register()
    hook = fake.registered[hooks.TARGETS["forward"].path][1]
    batch = SimpleNamespace(reqs=[], forward_mode=mode("idle"))
    assert hook(lambda worker, given, extra: (worker, given, extra), "worker", batch, extra=3) == ("worker", batch, 3)


@pytest.mark.parametrize(
    ("version", "asked", "is_on"),
    [
        ("0.5.16", None, False),
        ("0.5.17", None, True),
        ("0.5.23", None, True),
        ("0.5.23.post1", None, True),
        ("0.5.24", None, False),
        ("0.6.0rc1", None, False),
        ("0.5.24", True, True),
        ("0.5.23", False, False),
    ],
)
def test_graph_inputs_are_kept_where_the_version_needs_it(
    monkeypatch: pytest.MonkeyPatch, version: str, asked: bool | None, is_on: bool
) -> None:
    fake = FakeSGLang(monkeypatch, version)
    fake.add_all()
    wanted(monkeypatch, draws_target_ids=True, keeps_graph_inputs=asked)
    hooks.register()
    assert ("graph_inputs" in keys(fake)) == is_on


def test_kept_graph_inputs_stay_alive_for_replay(fake: FakeSGLang, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SGLang captures a break: without the hook its input is gone when the segment's own reference is."""

    class Tensor:
        pass

    def weak(x: Any) -> Any:
        return weakref.ref(x)

    def captured(keep: Callable[[Any], Any]) -> tuple[Any, weakref.ref[Any]]:
        tensor = Tensor()
        return keep(tensor), weakref.ref(tensor)

    fake.add_all()
    fake.add("graph_inputs", weak)
    wanted(monkeypatch, keeps_graph_inputs=True)
    hooks.register()
    kind, keep = fake.registered[hooks.TARGETS["graph_inputs"].path]
    assert kind == "replace"
    stored, alive = captured(weak)
    gc.collect()
    assert alive() is None
    stored, alive = captured(keep)
    gc.collect()
    assert alive() is stored


@pytest.mark.parametrize("own", ["none", "eagle", "dflash", "draft"])
def test_aux_states_are_captured_where_the_engine_wants_none_itself(
    fake: FakeSGLang, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    fake.add_all()
    wanted(monkeypatch, captures_aux=True)
    hooks.register()
    _, after = fake.registered[hooks.TARGETS["aux_config"].path]
    config = SimpleNamespace(
        eagle_use_aux_hidden_state=own == "eagle",
        eagle_aux_hidden_state_layer_ids=[1, 2, 3] if own == "eagle" else None,
        dflash_use_aux_hidden_state=own == "dflash",
    )
    result = after(config, server_args=None, model_config=None, spec_algorithm=None, is_draft_worker=own == "draft")
    assert result is config
    assert config.eagle_use_aux_hidden_state == (own in ("none", "eagle"))
    assert config.eagle_aux_hidden_state_layer_ids == ([1, 2, 3] if own == "eagle" else None)
