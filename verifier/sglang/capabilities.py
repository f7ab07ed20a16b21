"""What the engine behind the URL can do, read from /server_info, /model_info and the target's config.json at start."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from verifier.sglang.config import SGLangConfig
from verifier.sglang.held import HeldRequest
from verifier.sglang.plugin.orders import DrawOrder, PluginReport
from wire.errors import PeerLost
from wire.messages import VerifierInfo

__all__ = ["EngineCapabilities", "read_capabilities"]

TESTED_VERSIONS = ("0.5.17", "0.5.23")
# Attention back-ends that force pages of more than one token: every verify then recomputes up to a page.
Features = Literal["json", "tap", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """Resolved once per life of the engine.

    Fields:
        info: what the gateway needs to know of the target.
        features: how aux hidden states come.
        page_size: cached prefixes are whole pages of so many tokens.
        max_input_len: longest input the engine takes.
        draws_target_ids: the plugin draws in the engine, for all sampling but with a grammar.
        has_fast_lane: the plugin takes verify batches past HTTP.
        filters_jointly: top_k and top_p act on the same unfiltered probabilities also together with min_p.
        missing: what this engine can't do and what that means, for the log.
    """

    version: str
    weight_version: str | None
    info: VerifierInfo
    features: Features
    page_size: int
    max_input_len: int
    draws_target_ids: bool
    has_fast_lane: bool
    filters_jointly: bool
    missing: tuple[str, ...]

    def order(self, held: HeldRequest, *, wants_logprobs: bool) -> DrawOrder | None:
        """What the plugin draws for a request whose committed ids are ``held.ids``; None if it does not."""
        if not self.draws_target_ids or held.sampling.grammar is not None:
            return None
        return DrawOrder(
            sampling=held.sampling,
            base_len=len(held.ids),
            prompt_len=held.prompt_len,
            wants_logprobs=wants_logprobs,
        )


def read_capabilities(
    config: SGLangConfig,
    server_info: dict[str, Any],
    model_info: dict[str, Any],
    report: PluginReport | None = None,
) -> EngineCapabilities:
    """Resolve what was read; ``report`` is the plugin's own word, None if none draws in the engine.

    Raises:
        PeerLost: the target's directory is not readable here, so prompts could not be tokenized.
    """
    model_dir = _model_dir(config, model_info)
    model = _model_config(model_dir)
    missing: list[str] = []
    version = str(server_info.get("version", "unknown"))
    if version not in TESTED_VERSIONS:
        missing.append(f"SGLang {version} is untested, tested is {', '.join(TESTED_VERSIONS)}")
    num_layers = int(model["num_hidden_layers"])
    features, aux_layer_ids = _features(config, server_info, report, num_layers, missing)
    draws = report is not None and "target_ids" in report.on
    if not draws and config.target_ids == "auto":
        missing.append("no plugin draws in the engine: ids are chosen from lists, penalties and biases run plain")
    has_lane = _has_lane(config.lane_endpoint, report, missing)
    for name, reason in (report.off if report is not None else {}).items():
        missing.append(f"the plugin's {name} is off: {reason}")
    page_size = int(server_info.get("page_size") or 1)
    if page_size > 1:
        missing.append(f"page_size is {page_size}: every verify recomputes up to a page")
    if server_info.get("disable_radix_cache"):
        missing.append("the radix cache is off: every verify recomputes the whole context")
    if server_info.get("speculative_algorithm"):
        missing.append("the engine speculates itself: plain decode is not plain")
    context_len = _context_len(config, server_info, model)
    info = VerifierInfo(
        model_dir=str(model_dir),
        model_type=str(model.get("model_type", model_info.get("model_type", ""))),
        context_len=context_len,
        vocab_size=int(model["vocab_size"]),
        hidden_size=int(model["hidden_size"]),
        num_layers=num_layers,
        aux_layer_ids=aux_layer_ids,
        is_row_invariant=False,
        kernels=f"sglang {version}",
    )
    return EngineCapabilities(
        version=version,
        weight_version=model_info.get("weight_version"),
        info=info,
        features=features,
        page_size=page_size,
        max_input_len=context_len - 1,
        draws_target_ids=draws,
        has_fast_lane=has_lane,
        filters_jointly=server_info.get("sampling_backend") == "pytorch",
        missing=tuple(missing),
    )


def _model_dir(config: SGLangConfig, model_info: dict[str, Any]) -> Path:
    path = Path(config.model_dir if config.model_dir != "auto" else str(model_info.get("model_path", "")))
    if not (path.expanduser() / "config.json").is_file():
        raise PeerLost(f"no config.json in {str(path)!r}: set sglang.model_dir to a copy of the target's directory")
    return path.expanduser()


def _model_config(model_dir: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads((model_dir / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise PeerLost(f"config.json of the target can't be read: {error}") from None
    merged = {**data, **data.get("text_config", {})}  # multimodal targets keep the language model in text_config
    for key in ("num_hidden_layers", "vocab_size", "hidden_size"):
        if not isinstance(merged.get(key), int):
            raise PeerLost(f"config.json of the target has no {key}")
    return merged


def _has_lane(endpoint: str, report: PluginReport | None, missing: list[str]) -> bool:
    if not endpoint:
        return False
    if report is None or "fast_lane" not in report.on:
        missing.append("the plugin announces no fast lane: rounds go by HTTP")
        return False
    # ZeroMQ would connect to nothing for ever, and each round would wait for its time limit.
    path = endpoint.removeprefix("ipc://")
    if path != endpoint and not os.access(path, os.W_OK):
        missing.append(f"the fast lane's socket {path} can't be reached from here: rounds go by HTTP")
        return False
    return True


def _features(
    config: SGLangConfig,
    server_info: dict[str, Any],
    report: PluginReport | None,
    num_layers: int,
    missing: list[str],
) -> tuple[Features, tuple[int, ...]]:
    captures_aux = bool(server_info.get("enable_return_aux_hidden_states"))
    if report is not None and "aux_capture" in report.on:  # engines without that flag
        captures_aux = captures_aux or bool(server_info.get("enable_return_hidden_states"))
    wanted = config.features
    if wanted == "off":
        return "off", ()
    if not captures_aux:
        missing.append("no --enable-return-aux-hidden-states: no features, so nothing can be drafted")
        return "off", ()
    layer_ids = config.aux_layer_ids or (2, num_layers // 2, num_layers - 3)
    if server_info.get("return_aux_hidden_state_layer_ids") and not config.aux_layer_ids:
        # Whether a given id means a layer's input or its output differs by model class (Llama: output).
        missing.append("--return-aux-hidden-state-layer-ids is set: say in sglang.aux_layer_ids whose inputs they are")
    if wanted == "tap" or (wanted == "auto" and config.tap_ring_path and config.tap_socket_path):
        # The plugin makes its ring in the engine's warm-up pass.
        if not Path(config.tap_ring_path).exists():
            missing.append(
                f"the plugin has made no ring at {config.tap_ring_path}: is breakeven installed beside SGLang?"
            )
            return "off", ()
        return "tap", layer_ids
    missing.append("features come as JSON, without the plugin: for small models only")
    return "json", layer_ids


def _context_len(config: SGLangConfig, server_info: dict[str, Any], model: dict[str, Any]) -> int:
    limits = [int(model.get("max_position_embeddings") or 0)]
    if server_info.get("context_length"):
        limits = [int(server_info["context_length"])]
    # One request can't be longer than the whole KV pool. The engine keeps a few positions of its context to itself
    # (max_req_input_len is 6 less in 0.5.17 to 0.5.23); a verify near the end would be refused as too long an input.
    limits += [int(server_info.get(key) or 0) for key in ("max_total_num_tokens", "max_req_input_len")]
    limits.append(config.context_len)
    return min((limit for limit in limits if limit > 0), default=2048)
