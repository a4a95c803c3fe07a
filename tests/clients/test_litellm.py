"""``litellm`` as an OpenAI-compatible proxy sees the server: chat, stream, tool, completion."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices
litellm = pytest.importorskip("litellm", reason="litellm is not installed (make clients-test)")

from clients_support import API_KEY  # noqa: E402

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def ask(url: str, text: str, **options: Any) -> Any:
    return litellm.completion(
        model="hosted_vllm/pocket",
        api_base=f"{url}/v1",
        api_key=API_KEY,
        messages=[{"role": "user", "content": text}],
        temperature=0,
        num_retries=0,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        **options,
    )


def test_litellm_asks_streams_and_calls(url: str) -> None:
    whole = ask(url, "What is the capital of France?").choices[0].message.content
    assert "Paris" in whole
    pieces = ask(url, "What is the capital of France?", stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole
    call = ask(url, "What is the weather in Oslo?", tools=[TOOL]).choices[0].message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})


def test_litellm_completes_text(url: str) -> None:
    done = litellm.text_completion(
        model="text-completion-openai/pocket", api_base=f"{url}/v1", api_key=API_KEY, prompt="one two", max_tokens=4
    )
    assert done.usage.completion_tokens <= 4
