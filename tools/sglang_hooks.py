"""Does a version of SGLang still have what we hook and read? Answered from its source, without importing it.

    pip download --no-deps sglang==VERSION && unzip sglang-VERSION-*.whl -d DIR
    python -m tools.sglang_hooks DIR [DIR ...] [--record]

For each directory: every target of the plugin's hooks with its parameters, every field the hooks read, and every field,
reply key and route of the HTTP API that the client uses. Exits with 1 if anything is gone or changed. ``--record``
writes what was found to tests/verifier/sglang/recordings/hook-targets.json, by version.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from verifier.sglang.plugin.hooks import FIELDS, TARGETS, mismatch
from verifier.sglang.plugin.merged_rounds import ENDINGS

__all__ = ["RECORDING", "look_into", "main", "problems"]

RECORDING: Final = Path("tests/verifier/sglang/recordings/hook-targets.json")

API_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "sglang.srt.managers.io_struct.GenerateReqInput": (
        *("rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num"),
        *("return_hidden_states", "extra_key", "stream"),
    ),
    "sglang.srt.sampling.sampling_params.SamplingParams": (
        *("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "ignore_eos", "skip_special_tokens"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_new_tokens"),
        *("stop_token_ids", "json_schema", "regex"),
    ),
}
# Classes that must have one of these methods.
ALTERNATIVES: Final[dict[str, tuple[str, ...]]] = {
    "sglang.srt.mem_cache.radix_cache.RadixCache": ENDINGS,
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache": ENDINGS,
}
# Text that must stand in a file: routes, and keys of the reply.
TEXTS: Final[dict[str, tuple[str, ...]]] = {
    "sglang/srt/entrypoints/http_server.py": ("/generate", "/abort_request", "/server_info", "/model_info"),
    "sglang/srt/managers/tokenizer_manager.py": (
        *("finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "weight_version", "e2e_latency"),
        *("input_token_logprobs", "input_top_logprobs", "output_token_logprobs", "output_top_logprobs"),
        *("hidden_states", "customized_info"),
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Look, print, maybe record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args(argv)
    recorded = json.loads(RECORDING.read_text()) if RECORDING.exists() else {}
    is_whole = True
    for directory in options.directories:
        found = look_into(directory)
        wrong = problems(found)
        is_whole = is_whole and not wrong
        print(f"SGLang {found['version']}: {len(TARGETS)} targets, {'all there' if not wrong else 'not all there'}")
        for problem in wrong:
            print(f"  {problem}")
        recorded[found["version"]] = {key: value for key, value in found.items() if key != "version"}
    if options.record:
        RECORDING.write_text(json.dumps(dict(sorted(recorded.items())), indent=1) + "\n")
    sys.exit(0 if is_whole else 1)


def look_into(directory: Path) -> dict[str, Any]:
    """Version; targets: parameters by key, None where gone; missing: fields and texts that are not there."""
    targets = {key: _parameters(directory, target.path) for key, target in TARGETS.items()}
    missing = []
    for path, names in (*FIELDS.items(), *API_FIELDS.items()):
        there = _fields(directory, path)
        missing += [f"{path}.{name}" for name in names if name not in there]
    for path, names in ALTERNATIVES.items():
        if all(_parameters(directory, f"{path}.{name}") is None for name in names):
            missing.append(f"{path}.{'/'.join(names)}")
    for file, texts in TEXTS.items():
        source = _source(directory / file)
        missing += [f"{file}: {text}" for text in texts if text not in source]
    return {"version": _version(directory), "targets": targets, "missing": missing}


def problems(found: dict[str, Any]) -> list[str]:
    """What of the findings makes a capability or a call fail."""
    wrong = []
    for key, target in TARGETS.items():
        names = found["targets"].get(key)
        problem = f"{target.path} is not there" if names is None else mismatch(target, tuple(names))
        wrong += [problem] if problem is not None else []
    return wrong + [f"{name} is not there" for name in found["missing"]]


def _version(directory: Path) -> str:
    for line in _source(directory / "sglang" / "_version.py").splitlines():
        if line.startswith("__version__ ="):
            return line.rpartition("=")[2].strip().strip("'\"")
    return "unknown"


def _source(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _module(directory: Path, path: str) -> tuple[ast.Module | None, list[str]]:
    """The parsed module a dotted name begins with, and the rest of the name."""
    parts = path.split(".")
    for count in range(len(parts) - 1, 0, -1):
        file = directory.joinpath(*parts[:count]).with_suffix(".py")
        if file.is_file():
            return ast.parse(file.read_text()), parts[count:]
    return None, parts


def _parameters(directory: Path, path: str) -> list[str] | None:
    module, names = _module(directory, path)
    found: ast.AST | None = module
    for name in names:
        body = getattr(found, "body", [])
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = next((node for node in body if isinstance(node, kinds) and node.name == name), None)
    if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    arguments = found.args
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _fields(directory: Path, path: str) -> set[str]:
    """Annotated fields of a class and of its bases in the same module, and what its methods assign to self."""
    module, names = _module(directory, path)
    classes = {node.name: node for node in getattr(module, "body", []) if isinstance(node, ast.ClassDef)}
    found: set[str] = set()
    waiting = [names[0]]
    while waiting:
        node = classes.pop(waiting.pop(), None)
        if node is None:
            continue
        waiting += [base.id for base in node.bases if isinstance(base, ast.Name)]
        for part in ast.walk(node):
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                found.add(part.target.id)
            elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and _is_self(part.value):
                found.add(part.attr)
    return found


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


if __name__ == "__main__":
    main()
