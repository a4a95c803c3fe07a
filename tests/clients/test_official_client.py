"""The official ``openai`` client: sync, async, streams, tools, structured answers, both kinds of chat API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

from clients_support import API_KEY  # noqa: E402

CAPITAL = "What is the capital of France?"
WEATHER = {
    "name": "get_weather",
    "description": "Get the current weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}


class Answer(pydantic.BaseModel):  # type: ignore[name-defined,misc]
    """What the model is made to fill in."""

    city: Literal["Paris", "Rome"]
    is_capital: bool


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=API_KEY, max_retries=0) as official:
        yield official


def test_a_question_is_answered(client: Any) -> None:
    done = client.chat.completions.create(model="pocket", messages=user(CAPITAL), temperature=0, extra_body=NO_THOUGHT)
    assert "Paris" in done.choices[0].message.content
    assert client.models.list().data[0].id == "pocket"


def test_a_stream_and_the_async_client_say_the_same(client: Any, url: str) -> None:
    fields = {"model": "pocket", "messages": user("What is 17 + 25?"), "temperature": 0}
    whole = client.chat.completions.create(**fields).choices[0].message
    assert "42" in whole.content
    assert whole.reasoning_content == whole.reasoning
    text = ""
    with client.chat.completions.stream(**fields) as stream:
        for event in stream:
            if event.type == "content.delta":
                text += event.delta
        assert stream.get_final_completion().choices[0].message.content == text == whole.content

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=API_KEY, max_retries=0) as official:
            answers = await asyncio.gather(*(official.chat.completions.create(**fields) for _ in range(8)))
            return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(ask()) == [whole.content] * 8


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_is_called_streamed_or_not(client: Any, choice: Any) -> None:
    fields = {
        "model": "pocket",
        "messages": user("What is the weather in Oslo?"),
        "tools": [{"type": "function", "function": WEATHER}],
        "tool_choice": choice,
        "temperature": 0,
        "max_tokens": 200,
        "extra_body": NO_THOUGHT,
    }
    call = client.chat.completions.create(**fields).choices[0].message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
    with client.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert streamed.function.arguments == call.function.arguments


def test_structured_answers_parse(client: Any) -> None:
    done = client.chat.completions.parse(
        model="pocket",
        messages=user(CAPITAL),
        response_format=Answer,
        temperature=0,
        max_tokens=100,
        extra_body=NO_THOUGHT,
    )
    assert isinstance(done.choices[0].message.parsed, Answer)


def test_responses_answer_call_and_parse(client: Any) -> None:
    off = {"reasoning": {"effort": "none"}, "temperature": 0}
    assert "Paris" in client.responses.create(model="pocket", input=CAPITAL, **off).output_text
    tool = {"type": "function", "strict": False, **WEATHER}
    first = client.responses.create(model="pocket", input="What is the weather in Oslo?", tools=[tool], **off)
    call = next(item for item in first.output if item.type == "function_call")
    assert json.loads(call.arguments) == {"city": "Oslo"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"sky": "sunny"}'}
    items = [*user("What is the weather in Oslo?"), *first.output, result]
    with client.responses.stream(model="pocket", input=items, tools=[tool], **off) as stream:
        for _ in stream:
            pass
        assert "sunny" in stream.get_final_response().output_text
    parsed = client.responses.parse(model="pocket", input=CAPITAL, text_format=Answer, max_output_tokens=100, **off)
    assert isinstance(parsed.output_parsed, Answer)


def test_a_wrong_key_is_refused(url: str) -> None:
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
