"""The real thing as child processes: a random tiny target, a random EAGLE-3 head, and ``breakeven serve`` over them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN, LAYERS = 64, 7
AUX = (2, 3, 4)
SPECIAL = ("<s>", "</s>")
START_S = 90.0
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def write_target(model_dir: Path) -> Path:
    """A random llama over single bytes. Its logits are flat, so sampled drafts with shared noise are often right."""
    model_dir.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(model_dir / "tokenizer.json"))
    (model_dir / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE})
    )
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    model.save_pretrained(model_dir)
    return model_dir


def write_head(head_dir: Path, target_dir: Path) -> Path:
    """A random head in the flat layout of SpecForge; the embedding is the target's."""
    head_dir.mkdir(parents=True)
    vocab = json.loads((target_dir / "config.json").read_text())["vocab_size"]
    draft_vocab, heads, kv_heads, head_dim = 200, 4, 2, 16
    generator = torch.Generator().manual_seed(12)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    ids = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
    tensors = {
        "fc.weight": weight(HIDDEN, 3 * HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": weight(draft_vocab, HIDDEN),
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "midlayer.input_layernorm.weight": torch.ones(HIDDEN),
        "midlayer.post_attention_layernorm.weight": torch.ones(HIDDEN),
        "midlayer.mlp.gate_proj.weight": weight(128, HIDDEN),
        "midlayer.mlp.up_proj.weight": weight(128, HIDDEN),
        "midlayer.mlp.down_proj.weight": weight(HIDDEN, 128),
        "midlayer.self_attn.q_proj.weight": weight(heads * head_dim, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": weight(kv_heads * head_dim, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": weight(kv_heads * head_dim, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": weight(HIDDEN, heads * head_dim),
        "d2t": ids - torch.arange(draft_vocab),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, value=True),
    }
    save_file(tensors, head_dir / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab,
        "draft_vocab_size": draft_vocab,
        "max_position_embeddings": 512,
        # In eagle_config an id names a layer's output, hence one less than the inputs we want.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in AUX], "use_aux_hidden_state": True},
    }
    (head_dir / "config.json").write_text(json.dumps(config))
    return head_dir


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Server:
    """A running gateway with its children."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log_path: Path, model: str) -> None:
        self.process, self.url, self.log_path, self.model = process, url, log_path, model

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON of a GET."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=20) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def post(self, path: str, body: bytes, content_type: str = "application/json") -> tuple[int, Any]:
        """Status and JSON of a POST."""
        request = urllib.request.Request(self.url + path, data=body, headers={"Content-Type": content_type})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def stats(self) -> Any:
        """/stats."""
        return self.get("/stats")[1]

    def wait_for(self, what: str, patience_s: float = START_S) -> Any:
        """Poll /stats until this peer is up; real processes announce nothing to us."""
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log()
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                stats = self.stats()
                if stats[what]["state"] == "up":
                    return stats
            time.sleep(0.1)
        raise AssertionError(f"the {what} did not come up:\n{self.log()}")

    def log(self) -> str:
        """The end of the log, for failures."""
        return self.log_path.read_text(errors="replace")[-6000:]


@contextlib.contextmanager
def serving(
    directory: Path, *, model: str, head: str, model_name: str, cache_dir: str, **changes: Any
) -> Iterator[Server]:
    """Start ``breakeven serve`` and stop it at the end, whatever happened."""
    port = _free_port()
    tables: dict[str, dict[str, Any]] = {
        "gateway": {"port": port},
        "engine": {"model_name": model_name, "max_running": 64, "log_format": "json", "drain_timeout_s": 30.0},
        "speculation": {"mode": "on", "num_draft_tokens": 3},
        "verifier": {"model": model, "cache_dir": cache_dir},
        "drafter": {"head_dir": head, "cache_dir": cache_dir, "max_draft_tokens": 8},
    }
    for section, values in changes.items():
        tables[section] |= values
    lines = []
    for section, values in tables.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    profile = directory / "profile.toml"
    profile.write_text("\n".join(lines) + "\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("BREAKEVEN_")}
    log_path = directory / "server.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "breakeven", "serve", "--profile", str(profile)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**environ, "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[2],
        )
        server = Server(process, f"http://127.0.0.1:{port}", log_path, model_name)
        try:
            server.wait_for("verifier")
            server.wait_for("drafter")
            yield server
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
