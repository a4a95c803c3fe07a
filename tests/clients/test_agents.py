"""``openai-agents`` with one tool, over /v1/responses and over /v1/chat/completions, at once and streamed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

agents = pytest.importorskip("agents", reason="openai-agents is not installed (make clients-test)")
openai = pytest.importorskip("openai")

from clients_support import API_KEY  # noqa: E402


def run(url: str, api: str, *, stream: bool) -> tuple[str, list[str]]:
    asked: list[str] = []

    @agents.function_tool
    def get_weather(city: str) -> str:
        """Get the current weather of a city."""
        asked.append(city)
        return '{"sky": "sunny"}'

    async def go() -> str:
        agents.set_tracing_disabled(True)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=API_KEY, max_retries=0) as client:
            kind = agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
            agent = agents.Agent(
                name="weather",
                model=kind(model="pocket", openai_client=client),
                model_settings=agents.ModelSettings(
                    temperature=0, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
                ),
                tools=[get_weather],
            )
            if not stream:
                return str((await agents.Runner.run(agent, "What is the weather in Oslo?")).final_output)
            result: Any = agents.Runner.run_streamed(agent, "What is the weather in Oslo?")
            async for _ in result.stream_events():
                pass
            return str(result.final_output)

    return asyncio.run(go()), asked


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["responses", "chat"])
def test_an_agent_calls_its_tool_and_tells_what_it_said(url: str, api: str, stream: bool) -> None:
    answer, asked = run(url, api, stream=stream)
    assert asked == ["Oslo"]
    assert "sunny" in answer
