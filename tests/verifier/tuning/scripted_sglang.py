"""A scripted SGLang: a process of its own with SGLang's log lines, flags and HTTP, that misbehaves as it is told.

``--behave`` is one of
    well        serves; a token takes BASE_S
    fast, slow  the same in less and in more time
    wrong       serves, with other ids
    crash       dies while loading with CUDA's out-of-memory message
    stall       stops at 19 % of the weights, for ever
    nccl        serves, then a collective never ends: NCCL's watchdog says so and aborts
    silent      serves, then never answers again, without a word
    leave       serves, and leaves a process behind in a session of its own
Standard library only, so that it starts at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BASE_S = float(os.environ.get("BASE_S", "0.06"))
VOCAB = 1000
# How many tokens are served before trouble begins.
TROUBLE_AFTER = 6


def argument(flag: str, default: str) -> str:
    argv = sys.argv
    return argv[argv.index(flag) + 1] if flag in argv else default


BEHAVE = argument("--behave", "well")
STEP_S = BASE_S * {"fast": 0.3, "slow": 2.5}.get(BEHAVE, 1.0)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def next_id(ids: list[int]) -> int:
    shift = 7 if BEHAVE == "wrong" else 0
    return (ids[-1] * 31 + len(ids) * 17 + shift) % VOCAB


class Engine:
    def __init__(self) -> None:
        self.aborted: set[str] = set()
        self.served = 0

    def step(self) -> None:
        self.served += 1
        if self.served > TROUBLE_AFTER:
            if BEHAVE == "silent":
                time.sleep(3600)
            if BEHAVE == "nccl":
                time.sleep(0.3)
                say("[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=122, OpType=ALLREDUCE)")
                os._exit(134)
        time.sleep(STEP_S)


ENGINE = Engine()


def meta(item: dict[str, Any], made: int, reason: Any) -> dict[str, Any]:
    return {
        "id": item["rid"],
        "finish_reason": reason,
        "prompt_tokens": len(item["input_ids"]),
        "completion_tokens": made,
        "cached_tokens": max(0, item.get("logprob_start_len", len(item["input_ids"]) - 1)),
        "weight_version": "default",
        "e2e_latency": STEP_S,
    }


def tops(ids: list[int], num: int) -> list[Any]:
    first = next_id(ids)
    return [[0.0 if i == 0 else -20.0 - i, (first + i) % VOCAB, None] for i in range(max(1, num))]


def answer(item: dict[str, Any]) -> dict[str, Any]:
    ids, num = item["input_ids"], item.get("top_logprobs_num", 0)
    start = item.get("logprob_start_len", len(ids) - 1)
    found = meta(item, 1, {"type": "length", "length": 1})
    found["input_token_logprobs"] = [[-0.1 if p > start else None, ids[p], None] for p in range(start, len(ids))]
    found["input_top_logprobs"] = [tops(ids[:p], num) if p > start else None for p in range(start, len(ids))]
    found["output_token_logprobs"] = [[0.0, next_id(ids), None]]
    found["output_top_logprobs"] = [tops(ids, num)]
    return {"text": "", "output_ids": [next_id(ids)], "meta_info": found}


def stream(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    ids, made = list(item["input_ids"]), 0
    while item["rid"] not in ENGINE.aborted:
        ENGINE.step()
        ids.append(next_id(ids))
        made += 1
        yield {"text": "", "output_ids": ids[-made:], "meta_info": meta(item, made, None)}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/model_info":
            self.reply({"model_path": argument("--model-path", ""), "weight_version": "default"})
        else:
            self.reply({"version": "0.5.23", "page_size": 1, "sampling_backend": "pytorch"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/abort_request":
            ENGINE.aborted.add(body["rid"])
            self.reply({})
        elif body.get("stream"):
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            try:
                for chunk in stream(body):
                    self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
                self.wfile.write(b"data: [DONE]\n\n")
            except OSError:
                ENGINE.aborted.add(body["rid"])
            self.close_connection = True
        else:
            ENGINE.step()
            keys = list(body)
            items = [dict(zip(keys, values, strict=True)) for values in zip(*(body[k] for k in keys), strict=True)]
            self.reply([answer(item) for item in items])

    def reply(self, data: Any) -> None:
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


def main() -> None:
    say("server_args=ServerArgs(...)")
    say("Init torch distributed begin.")
    say("Load weight begin. avail mem=90.00 GB")
    for percent in (3, 19, 64, 100):
        say(f"Multi-thread loading shards:  {percent}% Completed | {percent}/100 [00:10<00:10]")
        if BEHAVE == "stall" and percent == 19:
            time.sleep(3600)
    if BEHAVE == "crash":
        say("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
        sys.exit(1)
    if BEHAVE == "leave":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    server = ThreadingHTTPServer(("127.0.0.1", int(argument("--port", "0"))), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    say("Uvicorn running on socket")
    say("The server is fired up and ready to roll!")
    threading.Event().wait()


if __name__ == "__main__":
    main()
