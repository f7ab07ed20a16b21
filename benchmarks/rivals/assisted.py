"""transformers' own generation, plain and assisted, as a child process: one JSON line in, lines of pieces out.

    python -m benchmarks.rivals.assisted MODEL_DIR THREADS [DEVICE]

Assisted generation takes one sequence at a time, so only batch 1 is measured. Assistants that need no second model:
prompt lookup (n-grams of the context) and early exit (the target's own first layers).
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

__all__ = ["main"]


class _Pieces:
    """A streamer that writes each piece with its time. transformers' TextStreamer holds back whole words."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._is_prompt = True
        self._ids: list[int] = []
        self._written = 0

    def put(self, value: Any) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        self._ids += value.reshape(-1).tolist()
        text = self._tokenizer.decode(self._ids)
        _write({"at_s": time.perf_counter(), "text": text[self._written :]})
        self._written = len(text)

    def end(self) -> None:
        _write({"done": True})


def main() -> None:
    """Answer requests until stdin ends. perf_counter() is the system's monotonic clock, shared with the parent."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    model_dir, threads, device = sys.argv[1], int(sys.argv[2]), (*sys.argv, "cpu")[3]
    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval().to(device)
    _write({"ready": True})
    for line in sys.stdin:
        ask = json.loads(line)
        torch.manual_seed(ask["seed"])
        inputs = tokenizer(ask["prompt"], return_tensors="pt", add_special_tokens=False).to(device)
        sampling = (
            {"do_sample": True, "temperature": ask["temperature"]} if ask["temperature"] else {"do_sample": False}
        )
        model.generate(
            **inputs,
            **sampling,
            **ask["options"],
            top_k=0,
            min_new_tokens=ask["max_tokens"],
            max_new_tokens=ask["max_tokens"],
            streamer=_Pieces(tokenizer),
            pad_token_id=tokenizer.eos_token_id,
        )


def _write(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
