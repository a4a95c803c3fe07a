"""The engine process and its client, without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import signal
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from server_sim import make_config, make_executor
from server_support import build_tokenizer, pull

from bireme.engine_client import EngineClient
from bireme.engine_process import launch_engine
from bireme.errors import EngineDeadError
from bireme.types import FinishReason, Request, RequestOutput, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine")
    build_tokenizer(path)
    return path


@contextlib.asynccontextmanager
async def running_engine(folder: Path, *, max_waiting: int = 4096, **options: Any) -> AsyncIterator[EngineClient]:
    config = make_config(folder, max_waiting=max_waiting)
    engine = launch_engine(config, functools.partial(make_executor, **options))
    client = EngineClient(engine)
    try:
        await client.wait_ready()
        yield client
    finally:
        await client.close()


def request(name: str, max_tokens: int = 5, num_prompt: int = 3) -> Request:
    return Request(name, list(range(10, 10 + num_prompt)), SamplingParams(max_tokens=max_tokens, ignore_eos=True))


async def outputs_of(client: EngineClient, asked: Request) -> list[RequestOutput]:
    return [output async for output in client.generate(asked)]


def with_engine(folder: Path, body: Callable[[EngineClient], Awaitable[None]], **options: Any) -> EngineClient:
    """Run ``body`` against a fresh engine; returns the closed client."""

    async def run() -> EngineClient:
        async with running_engine(folder, **options) as client:
            await asyncio.wait_for(body(client), 30)
        return client

    return asyncio.run(run())


def test_many_requests_each_get_their_tokens_and_one_end(folder: Path) -> None:
    async def body(client: EngineClient) -> None:
        assert client.capacity is not None
        assert client.capacity.num_slots == 64
        found = await asyncio.gather(*(outputs_of(client, request(f"r{i}", 1 + i % 7)) for i in range(200)))
        for i, outputs in enumerate(found):
            tokens = [token_id for output in outputs for token_id in output.token_ids]
            assert tokens == [10 + j % 3 for j in range(1 + i % 7)]
            assert [output.finish_reason for output in outputs].count(FinishReason.LENGTH) == 1
            assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert client.num_open == 0
        assert client.stats.num_free_slots == client.stats.num_slots

    client = with_engine(folder, body)
    assert client.engine.process.exitcode == 0


def test_the_sockets_lie_in_a_private_folder_that_goes_with_the_engine(folder: Path) -> None:
    async def body(client: EngineClient) -> None:
        path = Path(client.engine._folder)
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert {entry.name for entry in path.iterdir()} == {"commands", "events"}

    client = with_engine(folder, body)
    assert not Path(client.engine._folder).exists()


def test_leaving_the_iteration_frees_the_slot_within_two_steps(folder: Path) -> None:
    async def body(client: EngineClient) -> None:
        outputs = client.generate(request("left", 2000))
        async for _ in outputs:
            break
        steps = client.stats.num_steps
        await outputs.aclose()  # type: ignore[attr-defined]
        while client.stats.num_free_slots < client.stats.num_slots:
            await asyncio.sleep(0.005)
        assert client.stats.num_steps - steps <= 2
        assert len(await outputs_of(client, request("next"))) == 5

    for depth in (1, 2):
        with_engine(folder, body, step_seconds=0.03, depth=depth)


def test_a_refused_request_says_why_and_spoils_nothing(folder: Path) -> None:
    async def body(client: EngineClient) -> None:
        outputs = await outputs_of(client, Request("bad", [10_000], SamplingParams()))
        assert [output.finish_reason for output in outputs] == [FinishReason.ERROR]
        assert outputs[0].is_invalid
        assert "10000" in (outputs[0].error or "")
        assert len(await outputs_of(client, request("good"))) == 5

    with_engine(folder, body)


def test_a_random_mix_of_requests_aborts_and_departures_ends_with_everything_free(folder: Path) -> None:
    rng = random.Random(6)

    async def one(client: EngineClient, number: int) -> None:
        max_tokens = rng.choice([1, 5, 200])
        asked = request(f"r{number}", max_tokens, rng.choice([1, 70, 700]))
        how = rng.choice(["read", "leave", "abort", "cancel"])
        ends = 0
        if how == "cancel":
            task = asyncio.create_task(outputs_of(client, asked))
            await asyncio.sleep(rng.random() / 50)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            return
        async with client.submit([asked]) as submission:
            while outputs := await submission.take():
                ends += sum(output.finish_reason is not None for output in outputs)
                if how == "leave":
                    return
                if how == "abort" and ends == 0:
                    submission.abort(asked.request_id)
        assert ends == (1 if how == "read" else ends)
        assert ends <= 1

    async def body(client: EngineClient) -> None:
        await asyncio.gather(*(one(client, number) for number in range(300)))
        assert client.num_open == 0
        deadline = time.monotonic() + 5
        while client.stats.num_free_slots < client.stats.num_slots:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert client.stats.num_free_blocks == client.stats.num_blocks
        assert client.stats.num_waiting == client.stats.num_running == 0

    with_engine(folder, body, num_slots=8, step_seconds=0.001, depth=2)


@pytest.mark.parametrize("how", ["rank", "defect", "exit", "SIGKILL"])
def test_a_dead_engine_gives_every_open_request_one_error_and_takes_no_more(
    folder: Path, tmp_path: Path, how: str
) -> None:
    trip = tmp_path / "trip"
    deaths: list[str] = []

    async def body(client: EngineClient) -> None:
        client.on_death = lambda: deaths.append(client.error or "")
        tasks = [asyncio.create_task(outputs_of(client, request(f"r{i}", 2000))) for i in range(5)]
        while client.stats.num_running < 2:
            await asyncio.sleep(0.01)
        if how == "SIGKILL":
            os.kill(client.engine.process.pid or 0, signal.SIGKILL)
        else:
            pull(trip, how)
        for outputs in await asyncio.gather(*tasks):
            assert [output.finish_reason for output in outputs].count(FinishReason.ERROR) == 1
            assert outputs[-1].finish_reason is FinishReason.ERROR
            assert not outputs[-1].is_invalid
        assert not client.is_alive
        with pytest.raises(EngineDeadError):
            client.submit([request("late")])

    client = with_engine(folder, body, num_slots=2, step_seconds=0.01, trip=str(trip))
    assert len(deaths) == 1
    assert client.engine.process.exitcode == {"exit": 9, "SIGKILL": -9}.get(how, 1)


@pytest.mark.parametrize(
    ("failure", "words"), [("checkpoint", "'norm.weight' is missing"), ("defect", "could not start: ZeroDivisionError")]
)
def test_a_failed_start_is_told_in_its_own_words(folder: Path, failure: str, words: str) -> None:
    async def body(client: EngineClient) -> None:
        raise AssertionError("it started")

    with pytest.raises(EngineDeadError, match=words):
        with_engine(folder, body, failure=failure)


def test_draining_lets_what_runs_finish_and_aborts_what_does_not_in_time(folder: Path) -> None:
    async def run() -> None:
        async with running_engine(folder, step_seconds=0.01) as client:
            short = asyncio.create_task(outputs_of(client, request("short", 20)))
            long = asyncio.create_task(outputs_of(client, request("long", 2000)))
            while client.stats.num_running < 2:
                await asyncio.sleep(0.005)
            started = time.monotonic()
            assert await client.close(drain_seconds=1.0) == 0
            assert 0.9 < time.monotonic() - started < 5
            assert (await short)[-1].finish_reason is FinishReason.LENGTH
            assert (await long)[-1].finish_reason is FinishReason.ABORT

    asyncio.run(run())


def test_a_sigterm_to_the_engine_itself_drains_it(folder: Path) -> None:
    async def body(client: EngineClient) -> None:
        running = asyncio.create_task(outputs_of(client, request("running", 30)))
        while client.stats.num_running < 1:
            await asyncio.sleep(0.005)
        os.kill(client.engine.process.pid or 0, signal.SIGTERM)
        await asyncio.sleep(0.05)
        late = await outputs_of(client, request("late"))
        assert "shutting down" in (late[0].error or "")
        assert (await running)[-1].finish_reason is FinishReason.LENGTH

    client = with_engine(folder, body, step_seconds=0.01)
    assert client.engine.process.exitcode == 0


def test_ctrl_c_is_the_parents_to_answer(folder: Path) -> None:
    async def body(client: EngineClient) -> None:
        os.kill(client.engine.process.pid or 0, signal.SIGINT)
        assert len(await outputs_of(client, request("r"))) == 5

    with_engine(folder, body)


def test_a_client_takes_its_hands_off_the_engine_however_its_block_ends(folder: Path) -> None:
    async def fail() -> None:
        with contextlib.closing(launch_engine(make_config(folder), make_executor)) as engine, EngineClient(engine):
            raise ZeroDivisionError

    async def scenario() -> None:
        with pytest.raises(ZeroDivisionError):
            await fail()
        await asyncio.sleep(0.05)  # a loop that still watched the descriptors would abort the process here

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
