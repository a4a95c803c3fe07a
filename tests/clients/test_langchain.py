"""``langchain-openai`` with one tool."""

from __future__ import annotations

from typing import Any

import pytest

langchain_openai = pytest.importorskip(
    "langchain_openai", reason="langchain-openai is not installed (make clients-test)"
)
messages = pytest.importorskip("langchain_core.messages")
tools = pytest.importorskip("langchain_core.tools")

from clients_support import API_KEY  # noqa: E402


@tools.tool
def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    return '{"sky": "sunny"}'


@pytest.mark.parametrize("uses_responses", [False, True])
def test_a_chain_calls_its_tool_and_tells_what_it_said(url: str, uses_responses: bool) -> None:
    model = langchain_openai.ChatOpenAI(
        model="pocket",
        base_url=f"{url}/v1",
        api_key=API_KEY,
        temperature=0,
        max_retries=0,
        use_responses_api=uses_responses,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    ).bind_tools([get_weather])
    talk: list[Any] = [messages.HumanMessage("What is the weather in Oslo?")]
    call = model.invoke(talk)
    assert [(one["name"], one["args"]) for one in call.tool_calls] == [("get_weather", {"city": "Oslo"})]
    talk += [call, get_weather.invoke(call.tool_calls[0])]
    assert "sunny" in model.invoke(talk).text
    pieces = list(model.stream(talk))
    assert "sunny" in "".join(piece.text for piece in pieces)
    assert len(pieces) > 1
