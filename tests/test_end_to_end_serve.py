"""``bireme serve --tp 2`` as a user runs it, spoken to over HTTP: answers, disconnects, dying ranks, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from bireme.local_server import RunningServer, running_server

NAME = "tiny"
VOCAB = 512
FLAGS = ("--tp", "2", "--dtype", "float32", "--served-model-name", NAME, "--max-num-batched-tokens", "128")
EXIT_SECONDS = 15.0


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        head_dim=32,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=16384,
    )


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "server.log"


@contextlib.contextmanager
def serving(folder: Path, log: Path, *flags: str) -> Iterator[RunningServer]:
    """A server whose output is shown when the test fails, and that must leave no process behind."""
    with log.open("wb") as out:
        try:
            with running_server(folder, *FLAGS, *flags, log=out) as server:
                family = tree(server)
                yield server
            assert survivors(family) == []
        except BaseException:
            print(log.read_text(encoding="utf-8", errors="replace"))
            raise


@pytest.fixture(scope="module")
def server(folder: Path, log: Path) -> Iterator[RunningServer]:
    """The server that the tests without casualties share."""
    with serving(folder, log) as started:
        yield started


def tree(server: RunningServer) -> list[psutil.Process]:
    root = psutil.Process(server.process.pid)
    return [root, *root.children(recursive=True)]


def survivors(family: list[psutil.Process]) -> list[str]:
    _, alive = psutil.wait_procs(family[1:], timeout=EXIT_SECONDS)
    return [" ".join(process.cmdline()) for process in alive]


def rank_1(server: RunningServer) -> psutil.Process:
    found = [process for process in tree(server) if "rank1" in process.cmdline()]
    assert len(found) == 1, [process.cmdline() for process in tree(server)]
    return found[0]


def client(server: RunningServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(256) for _ in range(length)]


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=10, verify=False)


def metrics(server: RunningServer) -> dict[str, float]:
    """Every sample of /metrics by name, labels dropped, summed over labels."""
    found: dict[str, float] = {}
    for line in get(f"{server.url}/metrics").text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


@dataclass
class Answer:
    """What one stream brought."""

    token_ids: list[int]
    finish_reasons: list[str]
    text: str
    num_completion_tokens: int | None


async def stream(api: openai.AsyncOpenAI, prompt: list[int], **options: Any) -> Answer:
    answer = Answer([], [], "", None)
    chunks = await api.completions.create(
        model=NAME,
        prompt=prompt,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True, **options.pop("extra_body", {})},
        **options,
    )
    async for chunk in chunks:
        for choice in chunk.choices:
            answer.token_ids += getattr(choice, "token_ids", None) or []
            answer.text += choice.text
            if choice.finish_reason is not None:
                answer.finish_reasons.append(choice.finish_reason)
        if chunk.usage is not None:
            answer.num_completion_tokens = chunk.usage.completion_tokens
    return answer


def test_16_concurrent_streams_give_exactly_the_tokens_of_transformers(server: RunningServer, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    rng = random.Random(1)
    prompts = [prompt_of(rng, length) for length in (1, 2, 3, 4, 5, 17, 63, 64, 65, 100, 127, 128, 129, 130, 257, 300)]
    num_tokens = 32

    async def all_at_once() -> list[Answer]:
        async with client(server) as api:
            streams = (
                stream(api, prompt, max_tokens=num_tokens, temperature=0, extra_body={"ignore_eos": True})
                for prompt in prompts
            )
            return list(await asyncio.gather(*streams))

    answers = asyncio.run(all_at_once())
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    oracle.generation_config.eos_token_id = None
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        expected = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, pad_token_id=0
        )[0, len(prompt) :]
        assert answer.token_ids == expected.tolist()
        assert answer.finish_reasons == ["length"]
        assert answer.num_completion_tokens == num_tokens


def test_1000_random_submissions_aborts_and_disconnects_end_once_each_and_free_everything(
    server: RunningServer,
) -> None:
    rng = random.Random(2)

    async def operate(http: httpx.AsyncClient, number: int) -> str:
        kind = rng.choice(("stream", "plain", "leave", "cancel", "several", "bad"))
        prompt = prompt_of(rng, rng.choice((1, 2, 5, 30, 64, 65, 130, 300)))
        body: dict[str, Any] = {"model": NAME, "prompt": prompt, "max_tokens": rng.randint(1, 12), "seed": number}
        body["temperature"] = rng.choice((0.0, 1.0))
        if kind == "stream":
            events = [event async for event in sse(http, body | {"stream": True, "return_token_ids": True})]
            assert events[-1] == "[DONE]"
            choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
            assert [choice["finish_reason"] is not None for choice in choices] == [False] * (len(choices) - 1) + [True]
            num_tokens = sum(len(choice["token_ids"]) for choice in choices)
            assert num_tokens == body["max_tokens"] or choices[-1]["finish_reason"] == "stop"
        elif kind == "leave":
            left = rng.randint(0, 4)
            async with contextlib.aclosing(sse(http, body | {"stream": True, "max_tokens": 500})) as events:
                async for _ in events:
                    left -= 1
                    if left < 0:
                        break
        elif kind == "cancel":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rng.random() * 0.1):
                    await http.post("/v1/completions", json=body | {"max_tokens": 500})
        elif kind == "bad":
            answer = await http.post("/v1/completions", json=body | {"prompt": [*prompt, VOCAB]})
            assert answer.status_code == 400 and str(VOCAB) in answer.json()["error"]["message"]
        else:
            several = {"prompt": [prompt, prompt], "n": 2} if kind == "several" else {}
            answer = await http.post("/v1/completions", json=body | several)
            assert answer.status_code == 200, answer.text
            choices = answer.json()["choices"]
            assert sorted(choice["index"] for choice in choices) == list(range(4 if several else 1))
            assert all(choice["finish_reason"] in ("stop", "length") for choice in choices)
        return kind

    async def all_operations() -> list[str]:
        gate = asyncio.Semaphore(40)

        async def gated(http: httpx.AsyncClient, number: int) -> str:
            async with gate:
                return await operate(http, number)

        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, verify=False, timeout=60, limits=limits) as http:
            return list(await asyncio.gather(*(gated(http, number) for number in range(1000))))

    kinds = asyncio.run(all_operations())
    assert len(kinds) == 1000 and len(set(kinds)) == 6
    assert_all_free(server)


async def sse(http: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[str]:
    """The data of each event of a streamed completion; leaving the iterator early closes the connection."""
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                yield line.removeprefix("data: ")


def assert_all_free(server: RunningServer) -> None:
    """Within a second or two nothing runs or waits, and every slot and block is free."""
    deadline = time.monotonic() + 5
    while True:
        now = metrics(server)
        busy = now["vllm:num_requests_running"] + now["vllm:num_requests_waiting"]
        if busy == 0 or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert busy == 0
    assert now["bireme_state_slots_free"] == now["bireme_state_slots_total"] > 0
    assert now["bireme_kv_blocks_free"] == now["bireme_kv_blocks_total"] > 0


@pytest.mark.parametrize("moment", ["idle", "prefill", "decode"])
def test_killing_a_rank_fails_every_open_request_turns_health_503_and_ends_the_server(
    folder: Path, tmp_path: Path, moment: str
) -> None:
    with serving(folder, tmp_path / "log") as server:
        family = tree(server)
        errors = asyncio.run(kill_rank_while(moment, server))
        seen = health_until_gone(server)
        assert 503 in seen and seen <= ({200, 503} if moment == "idle" else {503})
        assert server.process.wait(EXIT_SECONDS) != 0
        assert survivors(family) == []
    assert errors == ({"idle": 0, "prefill": 1, "decode": 9}[moment])


async def kill_rank_while(moment: str, server: RunningServer) -> int:
    """Kill rank 1 at that moment; the number of open requests, all of which must fail."""
    victim = rank_1(server)
    rng = random.Random(3)
    if moment == "idle":
        os.kill(victim.pid, signal.SIGKILL)
        return 0
    async with client(server) as api:
        if moment == "prefill":
            before = metrics(server)["bireme_prefill_tokens_total"]
            waiting = [asyncio.create_task(stream(api, prompt_of(rng, 16000), max_tokens=8))]
            while await asyncio.to_thread(metrics, server) == before:
                pass
            await asyncio.sleep(0.1)
        else:
            options: dict[str, Any] = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}
            streams = [stream(api, prompt_of(rng, 20), **options) for _ in range(8)]
            plain = api.completions.create(model=NAME, prompt=prompt_of(rng, 20), **options)
            waiting = [asyncio.create_task(coroutine) for coroutine in (*streams, plain)]
            await asyncio.sleep(1.0)
        assert not any(task.done() for task in waiting)
        os.kill(victim.pid, signal.SIGKILL)
        killed_at = time.monotonic()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert time.monotonic() - killed_at < 4.0
    for result in results:
        assert isinstance(result, openai.APIError), result
    return len(results)


def health_until_gone(server: RunningServer) -> set[int]:
    """Every status that /health gave until nobody answered any more."""
    seen = set()
    deadline = time.monotonic() + EXIT_SECONDS
    while time.monotonic() < deadline:
        try:
            seen.add(get(f"{server.url}/health").status_code)
        except httpx.TransportError:
            return seen
        time.sleep(0.02)
    raise AssertionError("the server still answers")


def test_sigterm_lets_running_requests_finish_and_exits_0_with_no_process_left(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path / "log") as server:
        family = tree(server)

        async def drain() -> list[Answer]:
            async with client(server) as api:
                rng = random.Random(4)
                options: dict[str, Any] = {"max_tokens": 120, "extra_body": {"ignore_eos": True}}
                tasks = [asyncio.create_task(stream(api, prompt_of(rng, 20), **options)) for _ in range(4)]
                await asyncio.sleep(0.5)
                assert not any(task.done() for task in tasks)
                server.process.send_signal(signal.SIGTERM)
                return list(await asyncio.gather(*tasks))

        answers = asyncio.run(drain())
        assert [answer.finish_reasons for answer in answers] == [["length"]] * 4
        assert [len(answer.token_ids) for answer in answers] == [120] * 4
        assert server.process.wait(EXIT_SECONDS) == 0
        assert survivors(family) == []
