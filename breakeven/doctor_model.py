"""What ``breakeven doctor`` looks at once the target is loaded: tokenizer, chat template, head, greedy equality."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from breakeven.finding import Finding
from cpukernels.ports import ragged_rows
from drafter.device.opening import check_room, open_device, weight_bytes
from drafter.errors import OutOfDeviceMemory
from drafter.head.weights import HeadWeights
from drafter.selfcheck import AgreementTable, CheckSample, judge
from gateway.errors import InvalidRequest
from gateway.ports import ChatMessage
from gateway.text.tokenizer import ModelTextCodec
from verifier.embedded.model import TargetModel
from wire.settings import ConfigError

__all__ = [
    "OwnText",
    "agreement_samples",
    "check_agreement",
    "check_fit",
    "check_gpu",
    "check_lossless",
    "check_target",
    "check_template",
    "check_tokenizer",
    "own_text",
]

_QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain how a bicycle stays upright.",
    "Write three sentences about the sea.",
    "How do I make a cup of tea?",
    "List five animals and where they live.",
    "Why do leaves change colour in autumn?",
    "Write a short story about a fox.",
    "What should I pack for a week in the mountains?",
)
_TOKENS_EACH = 90

Verdict = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnText:
    """A prompt and the target's own greedy answer to it, up to its end."""

    ids: tuple[int, ...]
    prompt_len: int


def check_target(model: TargetModel) -> Finding:
    """What was loaded."""
    architecture = model.architecture
    return Finding(
        subject="target",
        verdict="ok",
        detail=f"{architecture.model_type}, {architecture.num_layers} layers, hidden {architecture.hidden_size}, "
        f"context {model.context_len}, aux layers {model.aux_layer_ids}",
    )


def check_tokenizer(codec: ModelTextCodec, *, model_dir: Path, vocab_size: int) -> Finding:
    """The tokenizer belongs to the target; its hash tells two machines apart that should be alike.

    Args:
        vocab_size: of the target, padding included.
    """
    digest = _short_hash((model_dir / "tokenizer.json").read_bytes())
    detail = f"{codec.vocab_size} ids of {vocab_size}, EOS {sorted(codec.eos_ids)}, sha256 {digest}"
    text = "Zwölf Boxkämpfer 🙂\n\tx = 1"
    if codec.vocab_size > vocab_size:
        problem, remedy = "it knows more ids than the target", "take tokenizer.json from the target's own directory"
    elif codec.decode(codec.encode(text)) != text:
        problem, remedy = "text does not come back as it went in", "take tokenizer.json from the target's own directory"
    elif not codec.eos_ids:
        problem = "no end token is known, so answers end at their limit only"
        remedy = "put eos_token_id into generation_config.json"
    else:
        return Finding(subject="tokenizer", verdict="ok", detail=detail)
    verdict: Verdict = "warning" if not codec.eos_ids else "failed"
    return Finding(subject="tokenizer", verdict=verdict, detail=f"{problem}: {detail}", remedy=remedy)


def check_template(codec: ModelTextCodec) -> Finding:
    """The chat template renders a conversation; the hash is that of the ids it gives, tokenizer included."""
    if not codec.has_template:
        return Finding(
            subject="chat template",
            verdict="warning",
            detail='there is none: chats are written as "role: text" lines',
            remedy="put the model's chat_template.jinja into its directory, or use /v1/completions",
        )
    try:
        rendered = codec.render_chat([ChatMessage(role="user", content="ping")])
    except InvalidRequest as error:
        return Finding(
            subject="chat template",
            verdict="failed",
            detail=error.message,
            remedy="take chat_template.jinja or tokenizer_config.json from the model's authors",
        )
    digest = _short_hash(" ".join(map(str, rendered)).encode())
    return Finding(subject="chat template", verdict="ok", detail=f"a chat of one word has ids of sha256 {digest}")


def _short_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def check_fit(model: TargetModel, head: HeadWeights) -> list[Finding]:
    """The head was made for this target: the layers it reads, their size, the ids it knows."""

    def finding(is_ok: bool, detail: str, remedy: str) -> Finding:
        return Finding(
            subject="head fits target",
            verdict="ok" if is_ok else "failed",
            detail=detail,
            remedy="" if is_ok else remedy,
        )

    wanted, given = head.config.aux_layer_ids, model.aux_layer_ids
    return [
        finding(
            not wanted or tuple(wanted) == tuple(given),
            f"{head.head_format}: wants the inputs of layers {tuple(wanted)}, the target gives {tuple(given)}",
            f"set verifier.aux_layer_ids = {list(wanted)}",
        ),
        finding(
            head.feature_size == model.feature_size,
            f"features of {head.feature_size} numbers, the target gives {model.feature_size}",
            "this head belongs to another target",
        ),
        finding(
            int(head.target_ids.max()) < model.architecture.vocab_size,
            f"{len(head.target_ids)} draft ids of {model.architecture.vocab_size}",
            "this head belongs to another target",
        ),
    ]


def check_gpu(device_name: str, head: HeadWeights) -> Finding:
    """The GPU of ``drafter.device`` is there and has room for the head."""
    try:
        device = open_device(device_name)
        check_room(head, device, torch.bfloat16)
    except (ConfigError, OutOfDeviceMemory) as error:
        return Finding(
            subject="drafter's GPU", verdict="failed", detail=str(error), remedy='or set drafter.device = "cpu"'
        )
    size_gb = weight_bytes(head, torch.bfloat16) / 1e9
    detail = f"{torch.cuda.get_device_name(device)}, the head takes {size_gb:.1f} GB of it"
    return Finding(subject="drafter's GPU", verdict="ok", detail=detail, remedy="")


def own_text(model: TargetModel, codec: ModelTextCodec) -> list[OwnText]:
    """The target's own greedy answers to a few questions; all questions in one batch."""
    texts = [codec.render_chat([ChatMessage(role="user", content=question)]) for question in _QUESTIONS]
    caches = [model.new_cache() for _ in texts]
    inputs = [list(text) for text in texts]
    prompt_lens = [len(text) for text in texts]
    for _ in range(_TOKENS_EACH):
        rows = ragged_rows(caches, [len(ids) for ids in inputs])
        hidden, _ = model.forward(np.array([i for ids in inputs for i in ids], dtype=np.int64), rows)
        chosen = model.logits(hidden[[stop - 1 for stop in rows.starts[1:]]]).argmax(axis=1)
        for cache, ids, text, token_id in zip(caches, inputs, texts, chosen, strict=True):
            cache.length += len(ids)
            ids[:] = [int(token_id)]
            text.append(int(token_id))
    return [
        OwnText(ids=tuple(_until_end(text, prompt_len, codec.eos_ids)), prompt_len=prompt_len)
        for text, prompt_len in zip(texts, prompt_lens, strict=True)
    ]


def _until_end(text: list[int], prompt_len: int, eos_ids: frozenset[int]) -> list[int]:
    ends = (index for index in range(prompt_len, len(text)) if text[index] in eos_ids)
    return text[: next(ends, len(text) - 1) + 1]


def agreement_samples(model: TargetModel, texts: Sequence[OwnText]) -> list[CheckSample]:
    """The texts with the target's features, also those of the layers beside, for ``check_head``."""
    samples = []
    layers = model.architecture.num_layers
    for text in texts:
        ids = np.array(text.ids, dtype=np.int64)
        features, argmax = {}, None
        for shift in (-1, 0, 1):
            shifted = tuple(layer + shift for layer in model.aux_layer_ids)
            if all(0 <= layer < layers for layer in shifted):
                hidden, states = model.with_aux_layers(shifted).forward(
                    ids, ragged_rows([model.new_cache()], [len(ids)])
                )
                features[shift] = torch.from_numpy(states)
                if argmax is None:
                    argmax = torch.from_numpy(model.logits(hidden).argmax(axis=1))
        assert argmax is not None
        samples.append(
            CheckSample(
                token_ids=torch.from_numpy(ids),
                features=features,
                target_argmax=argmax,
                prompt_len=text.prompt_len,
            )
        )
    return samples


def check_lossless(model: TargetModel, texts: Sequence[OwnText]) -> Finding:
    """Decode steps of one row gave these texts; does one pass over many rows choose the same ids?"""
    differing = 0
    for text in texts:
        ids = np.array(text.ids, dtype=np.int64)
        hidden, _ = model.forward(ids, ragged_rows([model.new_cache()], [len(ids)]))
        again = model.logits(hidden[text.prompt_len - 1 : -1]).argmax(axis=1)
        differing += int((again != ids[text.prompt_len :]).sum())
    total = sum(len(text.ids) - text.prompt_len for text in texts)
    verdict: Verdict = "ok"
    remedy = ""
    if differing and model.kernels.is_row_invariant:
        verdict, remedy = "failed", "the kernels compute wrongly here: set verifier.kernels = torch, and report it"
    elif differing:
        verdict, remedy = "warning", "near ties flip without row-invariant kernels: install a C compiler"
    return Finding(
        subject="greedy equality",
        verdict=verdict,
        detail=f"{total - differing} of {total} ids are the same in one pass and in single steps",
        remedy=remedy,
    )


def check_agreement(table: AgreementTable, *, force: bool) -> Finding:
    """The head guesses what the target says, with the settings it has."""
    verdict = judge(table)
    if verdict.kind == "ok":
        return Finding(subject="head agreement", verdict="ok", detail=verdict.message)
    return Finding(
        subject="head agreement",
        verdict="warning" if force else "failed",
        detail=verdict.message,
        remedy="" if force else "fix the setting, or pass --force to serve it all the same",
    )
