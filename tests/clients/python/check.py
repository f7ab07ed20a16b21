"""What LangChain and LiteLLM make of our answers, as one JSON object. Runs in an environment of its own."""

import json
import os
import sys

import litellm
from langchain_openai import ChatOpenAI

URL, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": PARAMETERS}}]
HI, ASK = [{"role": "user", "content": "Hi"}], [{"role": "user", "content": "How is the weather?"}]


def main() -> None:
    """Run both."""
    sys.stdout.write(json.dumps({"langchain": langchain(), "litellm": lite()}) + "\n")


def langchain() -> dict[str, object]:
    """Whole, streamed, tools and an error inside a stream."""
    chat = ChatOpenAI(model="toy", base_url=URL, api_key=KEY, max_retries=0, stream_usage=True)
    seen: dict[str, object] = {"whole": chat.invoke("Hi").content}
    joined = None
    for chunk in chat.stream("Hi"):
        joined = chunk if joined is None else joined + chunk
    seen["streamed"] = joined.content
    seen["finish"] = joined.response_metadata["finish_reason"]
    seen["usage"] = joined.usage_metadata["output_tokens"]
    called = None
    for chunk in chat.bind_tools(TOOLS).stream("How is the weather?"):
        called = chunk if called is None else called + chunk
    seen["calls"] = [[call["name"], call["args"]["city"]] for call in called.tool_calls]
    try:
        list(chat.stream("break now"))
    except Exception as error:  # noqa: BLE001 # whatever the library raises is what we want to see
        seen["broken"] = type(error).__name__
    return seen


def lite() -> dict[str, object]:
    """The same through both provider names that fit us."""
    litellm.suppress_debug_info = True
    seen: dict[str, object] = {}
    for provider in ("openai", "hosted_vllm"):
        base = {"model": f"{provider}/toy", "api_base": URL, "api_key": KEY, "num_retries": 0, "max_retries": 0}
        whole = litellm.completion(messages=HI, **base)
        chunks = list(litellm.completion(messages=HI, stream=True, stream_options={"include_usage": True}, **base))
        called = litellm.stream_chunk_builder(list(litellm.completion(messages=ASK, tools=TOOLS, stream=True, **base)))
        seen[provider] = {
            "whole": whole.choices[0].message.content,
            "streamed": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
            "usage": chunks[-1].usage.completion_tokens,
            "calls": [
                [call.function.name, json.loads(call.function.arguments)["city"]]
                for call in called.choices[0].message.tool_calls
            ],
            "finish": called.choices[0].finish_reason,
        }
    return seen


if __name__ == "__main__":
    main()
