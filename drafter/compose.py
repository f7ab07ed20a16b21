"""Composition root of the drafter process: names the concrete classes, loads, serves."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import torch

from cpukernels.choose import choose_kernels
from drafter.config import DrafterConfig
from drafter.device.model import DeviceModel
from drafter.device.opening import check_room, named_errors, open_device
from drafter.device.runner import DeviceRunner
from drafter.engine import DraftEngine, EngineLimits
from drafter.head.config import HeadOverrides
from drafter.head.loader import load_head
from drafter.head.weights import HeadWeights
from drafter.host_runner import HostRunner
from drafter.model import DraftModel, suitable_kernels
from drafter.ports import DraftRunner
from drafter.ring import RingFeatures
from drafter.server import DrafterServer, LoadedEngine, LoadProgress
from wire.messages import DrafterInfo
from wire.settings import ConfigError

__all__ = ["head_overrides", "load_engine", "run"]

_log = logging.getLogger(__name__)


def run(config: DrafterConfig) -> None:
    """Serve until SIGTERM; raises what loading raises.

    Raises:
        ConfigError: no head is configured. HeadError: the head can't be loaded. KernelBuildError: see choose_kernels.
    """
    if config.head_dir == Path():
        raise ConfigError("drafter.head_dir", "must name the head's directory")
    torch.set_num_threads(config.num_threads)
    server = DrafterServer(
        config.endpoint,
        lambda progress: load_engine(config, progress),
        max_waiting=config.max_waiting,
        parent_pid=(config.parent_pid or os.getppid()) if config.exit_with_parent else None,
    )
    try:
        asyncio.run(server.run())
    except* Exception as errors:
        # One failing task is one error; the group around it tells nobody anything.
        if len(errors.exceptions) == 1:
            raise errors.exceptions[0] from None
        raise


def head_overrides(config: DrafterConfig) -> HeadOverrides:
    """What the settings state against the head's own config."""
    residual = {"config": None, "yes": True, "no": False}[config.norm_before_residual]
    feedback = {"config": None, "post_norm": True, "pre_norm": False}[config.feedback]
    return HeadOverrides(
        norm_before_residual=residual,
        feeds_back_normed=feedback,
        rope_theta=config.rope_theta or None,
        aux_layer_ids=config.aux_layer_ids,
    )


def load_engine(config: DrafterConfig, progress: LoadProgress) -> LoadedEngine:
    """Load the head and pack it; runs in the engine thread.

    Raises:
        HeadError: the head can't be loaded. KernelBuildError: native kernels were demanded and can't be built.
        ConfigError: there is no such GPU. OutOfDeviceMemory: the head does not fit into what is free of it.
    """
    runner, head = _host_runner(config, progress) if config.device == "cpu" else _device_runner(config, progress)
    limits = EngineLimits(
        max_draft_tokens=config.max_draft_tokens,
        max_context_len=config.max_context_len,
        max_requests=config.max_requests,
        shared_noise=config.shared_noise,
    )
    info = DrafterInfo(
        head_dir=str(config.head_dir),
        head_format=head.head_format,
        target_vocab_size=head.config.vocab_size,
        draft_vocab_size=len(head.target_ids),
        feature_size=head.feature_size,
        aux_layer_ids=head.config.aux_layer_ids,
        max_draft_tokens=config.max_draft_tokens,
    )
    return LoadedEngine(engine=DraftEngine(runner, RingFeatures(config.ring_path), limits), info=info)


def _host_runner(config: DrafterConfig, progress: LoadProgress) -> tuple[DraftRunner, HeadWeights]:
    progress.report("building kernels", 0.0)
    kernels = choose_kernels(config.kernels, cache_dir=config.cache_dir.expanduser(), warn=_warn)
    head = _load_head(config, progress)
    num_positions = config.max_context_len + config.max_draft_tokens
    model = DraftModel(head, suitable_kernels(kernels, head, _warn), num_positions=num_positions)
    return HostRunner(model), head


def _device_runner(config: DrafterConfig, progress: LoadProgress) -> tuple[DraftRunner, HeadWeights]:
    progress.report("opening the GPU", 0.0)
    device = open_device(config.device)
    head = _load_head(config, progress)
    check_room(head, device, torch.bfloat16)
    num_positions = config.max_context_len + config.max_draft_tokens
    with named_errors(device):
        model = DeviceModel(head, device=device, dtype=torch.bfloat16, num_positions=num_positions)
    runner = DeviceRunner(model)
    runner.warm_up(config.max_draft_tokens)
    used_gb = torch.cuda.memory_reserved(device) / 1e9
    _log.info("event=head_on_gpu device=%s name=%r gb=%.2f", device, torch.cuda.get_device_name(device), used_gb)
    return runner, head


def _load_head(config: DrafterConfig, progress: LoadProgress) -> HeadWeights:
    progress.report("loading head", 0.2)
    head = load_head(config.head_dir, target_model_dir=config.target_model_dir, overrides=head_overrides(config))
    progress.report("packing head", 0.7)
    return head


def _warn(message: str) -> None:
    _log.warning("event=kernel_fallback reason=%r", message)
