"""``bireme eval pocket``: unseen cases of every skill through the HTTP server, checked exactly.

Cases of all skills are mixed (in an order that the seed decides), so that long prompts, short ones and decoding rows
share steps. Decoding is greedy. A right answer is one that ended by itself and that its case's checker accepts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bireme.bench.record import emit, record
from bireme.checkpoint.hf_config import load_model_config
from bireme.errors import ConfigError, EngineDeadError
from bireme.local_server import running_server
from bireme.pocket import NAME, resolve
from bireme.pocket.skills import SKILLS, Case, eval_cases

OVERALL, EACH, AGREEMENT = "overall", "each", "agreement"

REQUEST_SECONDS = 900.0
"""Long enough for sixteen of the longest prompts on one slow core."""


@dataclass(slots=True)
class Answer:
    """What came back for one case.

    Attributes:
        thought: what was written before the answer.
        content: the answer's text, without its thought.
        tool_calls: as the server parsed them out of the answer.
        token_ids: the generated ids.
        num_prompt_tokens, num_tokens: of the prompt and of the answer, as the server's usage counts them.
        first_seconds, seconds: from sending the request to the first piece (of a stream), and to the end of the answer.
        error: why there is no answer; None when there is one.
    """

    case: Case
    thought: str = ""
    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    finish_reason: str | None = None
    first_seconds: float = 0.0
    seconds: float = 0.0
    error: str | None = None

    @property
    def is_right(self) -> bool:
        ended = self.error is None and self.finish_reason in ("stop", "tool_calls")
        return ended and self.case.check(self.content, self.tool_calls)


@dataclass(frozen=True, slots=True)
class Row:
    """A group's figures: ``seconds`` is the mean time of an answer, ``tokens`` the sum over answers."""

    group: str
    cases: int
    right: int
    tokens: int
    seconds: float

    @property
    def percent(self) -> float:
        return 100 * self.right / self.cases


def request_body(case: Case, model: str, *, stream: bool = False) -> dict[str, Any]:
    """The body of /v1/chat/completions that asks ``case`` of a server, greedily."""
    body: dict[str, Any] = {
        "model": model,
        "messages": openai_messages(case.messages),
        "temperature": 0,
        "max_tokens": case.max_tokens,
        "chat_template_kwargs": {"enable_thinking": case.enable_thinking},
        "return_token_ids": True,
    }
    if case.tools:
        body["tools"] = case.tools
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def openai_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A case's messages as the API has them: calls have ids and arguments as JSON text, responses name their call."""
    sent: list[dict[str, Any]] = []
    last_id = ""
    for message in messages:
        new = dict(message)
        if message.get("tool_calls"):
            new["tool_calls"] = []
            for number, call in enumerate(message["tool_calls"]):
                last_id = f"call_{len(sent)}_{number}"
                function = call["function"]
                arguments = json.dumps(function["arguments"], ensure_ascii=False)
                called = {"name": function["name"], "arguments": arguments}
                new["tool_calls"].append({"id": last_id, "type": "function", "function": called})
        elif message["role"] == "tool":
            new["tool_call_id"] = last_id
        sent.append(new)
    return sent


async def ask(client: httpx.AsyncClient, model: str, answer: Answer, *, stream: bool = False) -> Answer:
    """Send the case of an empty answer and fill it in, piece by piece if streamed; a failure is its ``error``."""
    body = request_body(answer.case, model, stream=stream)
    started = time.perf_counter()
    try:
        if stream:
            async for _ in _stream_into(client, body, answer):
                answer.first_seconds = answer.first_seconds or time.perf_counter() - started
        else:
            response = await client.post("/v1/chat/completions", json=body)
            _raise_for_error(response.status_code, response.content)
            _read_whole(response.json(), answer)
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.seconds = time.perf_counter() - started
    return answer


def _raise_for_error(status: int, content: bytes) -> None:
    if status != 200:
        raise ValueError(f"the server answered {status}: {content[:500].decode('utf-8', 'replace')}")


def _read_whole(body: dict[str, Any], answer: Answer) -> None:
    choice = body["choices"][0]
    message = choice["message"]
    answer.thought = message.get("reasoning_content") or ""
    answer.content = message.get("content") or ""
    answer.tool_calls = message.get("tool_calls") or []
    answer.finish_reason = choice["finish_reason"]
    _read_usage(body["usage"], answer)
    answer.token_ids = choice.get("token_ids") or []
    answer.prompt_token_ids = body.get("prompt_token_ids") or []


def _read_usage(usage: dict[str, Any], answer: Answer) -> None:
    answer.num_prompt_tokens = usage["prompt_tokens"]
    answer.num_tokens = usage["completion_tokens"]


async def _stream_into(client: httpx.AsyncClient, body: dict[str, Any], answer: Answer) -> AsyncIterator[None]:
    """Add what each event brings to ``answer``; yields once for each."""
    calls: dict[int, dict[str, str]] = {}
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            _raise_for_error(response.status_code, await response.aread())
        async for chunk in _events(response):
            if "error" in chunk:
                raise ValueError(f"the server ended the stream: {chunk['error']}")
            answer.prompt_token_ids += chunk.get("prompt_token_ids") or []
            if chunk.get("usage"):
                _read_usage(chunk["usage"], answer)
            for choice in chunk["choices"]:
                delta = choice["delta"]
                answer.thought += delta.get("reasoning_content") or ""
                answer.content += delta.get("content") or ""
                for part in delta.get("tool_calls") or []:
                    call = calls.setdefault(part["index"], {"name": "", "arguments": ""})
                    call["name"] += part["function"].get("name") or ""
                    call["arguments"] += part["function"].get("arguments") or ""
                answer.token_ids += choice.get("token_ids") or []
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            answer.tool_calls = [{"function": calls[index]} for index in sorted(calls)]
            yield


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        data = line.removeprefix("data: ")
        if data != line and data != "[DONE]":
            yield json.loads(data)


async def ask_all(
    url: str,
    model: str,
    cases: Sequence[Case],
    *,
    concurrency: int,
    stream: bool = False,
    seed: int = 0,
    on_answer: Callable[[Answer], None] = lambda answer: None,
) -> list[Answer]:
    """Ask every case, ``concurrency`` at once and mixed by ``seed``; answers come in the order of ``cases``."""
    answers: list[Answer | None] = [None] * len(cases)
    waiting = list(range(len(cases)))
    Random(seed).shuffle(waiting)
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, verify=False, timeout=REQUEST_SECONDS, limits=limits) as client:

        async def ask_on() -> None:
            while waiting:
                index = waiting.pop()
                answers[index] = answer = await ask(client, model, Answer(cases[index]), stream=stream)
                on_answer(answer)

        await asyncio.gather(*(ask_on() for _ in range(min(concurrency, len(cases)))))
    return [answer for answer in answers if answer is not None]


def served_model(url: str) -> str:
    """The first name that the server at ``url`` lists.

    Raises:
        ConfigError: there is no such server.
    """
    try:
        with httpx.Client(base_url=url, verify=False, timeout=30) as client:
            return str(client.get("/v1/models").raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"cannot evaluate the server at {url} (--url): {error}") from error


def rows_of(answers: Sequence[Answer]) -> list[Row]:
    """Figures by group in the order of the answers, then of all together."""
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(answer.case.group, []).append(answer)
    return [_row(group, members) for group, members in groups.items()] + [_row(OVERALL, answers)]


def _row(group: str, answers: Sequence[Answer]) -> Row:
    return Row(
        group,
        len(answers),
        sum(answer.is_right for answer in answers),
        sum(answer.num_tokens for answer in answers),
        sum(answer.seconds for answer in answers) / max(1, len(answers)),
    )


def read_requirements(given: Sequence[str]) -> dict[str, float]:
    """``NAME=PERCENT`` entries as a mapping.

    NAME is ``overall``, ``each`` (every group), a skill, a group such as ``recall@6000``, or ``agreement``.

    Raises:
        ConfigError: an entry is malformed.
    """
    required: dict[str, float] = {}
    for entry in given:
        name, _, text = entry.partition("=")
        try:
            percent = float(text)
        except ValueError:
            percent = -1.0
        if not 0 <= percent <= 100:
            raise ConfigError(f"--require {entry}: it must be NAME=PERCENT, with a number from 0 to 100")
        if name.partition("@")[0] not in (OVERALL, EACH, AGREEMENT, *SKILLS):
            raise ConfigError(
                f"--require {entry}: {name!r} is none of {OVERALL}, {EACH}, {AGREEMENT}, {', '.join(SKILLS)}"
            )
        required[name] = percent
    return required


def bound_of(group: str, required: dict[str, float]) -> float:
    """What a group (or ``overall``) has to reach in per cent: its own entry, its skill's, or that of ``each``."""
    skill = group.partition("@")[0]
    names = [OVERALL] if group == OVERALL else [group, skill, EACH]
    return next((required[name] for name in names if name in required), 0.0)


def shortfalls(rows: Sequence[Row], required: dict[str, float], agreement: float | None = None) -> list[str]:
    """What is below its bound, one sentence each."""
    found = [
        f"{row.group} is at {row.percent:.1f} %, below the required {bound_of(row.group, required):g} %"
        for row in rows
        if row.percent < bound_of(row.group, required)
    ]
    if AGREEMENT in required and (agreement is None or agreement < required[AGREEMENT]):
        measured = "was not measured (--compare-transformers)" if agreement is None else f"is at {agreement:.2f} %"
        found.append(f"agreement {measured}; {required[AGREEMENT]:g} % is required")
    return found


def print_table(rows: Sequence[Row], title: str, required: dict[str, float], console: Console) -> None:
    """The figures for a person."""
    table = Table(title=title, title_justify="left")
    table.add_column("skill")
    for name in ("right", "cases", "exact", "tokens", "s/answer"):
        table.add_column(name, justify="right")
    for row in rows:
        if row.group == OVERALL:
            table.add_section()
        color = "red" if row.percent < bound_of(row.group, required) else "green"
        exact = f"[{color}]{row.percent:.1f} %[/{color}]"
        table.add_row(row.group, str(row.right), str(row.cases), exact, str(row.tokens), f"{row.seconds:.2f}")
    console.print(table)


def print_wrong(answers: Sequence[Answer], most: int, console: Console) -> None:
    """Up to ``most`` wrong answers of each group: the end of the question, what was wanted, what came."""
    shown: dict[str, int] = {}
    for answer in answers:
        group = answer.case.group
        if answer.is_right or shown.get(group, 0) >= most:
            continue
        shown[group] = shown.get(group, 0) + 1
        came = answer.error or answer.content or json.dumps([call["function"] for call in answer.tool_calls])
        question = str(answer.case.messages[-1]["content"])[-200:]
        console.print(
            f"{group}: …{question!r}\n  wanted {answer.case.expected!r}\n  got    {came!r} ({answer.finish_reason})",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """What ``bireme eval pocket`` was asked for.

    Attributes:
        model: ``pocket`` or the folder of another checkpoint that was trained on these skills.
        url: of a running server; None to start one for the time of the evaluation.
        flags: of ``bireme serve``, for the server that is started.
        per_group: cases of each skill, and of each distance of recall.
        show: wrong answers to print for each group.
    """

    model: str = NAME
    url: str | None = None
    flags: tuple[str, ...] = ()
    per_group: int = 40
    skills: tuple[str, ...] = SKILLS
    seed: int = 0
    concurrency: int = 16
    stream: bool = False
    compare: bool = False
    required: dict[str, float] = field(default_factory=dict)
    show: int = 0
    as_json: bool = False
    append: Path | None = None


def run(settings: Settings, console: Console) -> int:
    """Evaluate, print, and return the exit code: 1 when something is below its bound or was not answered, else 0.

    Raises:
        ConfigError: a skill that does not exist, no such server, or no transformers to compare with.
        EngineDeadError: the server could not start.
    """
    unknown = [skill for skill in settings.skills if skill not in SKILLS]
    if unknown:
        raise ConfigError(f"--skill {unknown[0]}: it is none of {', '.join(SKILLS)}")
    if settings.compare and settings.stream:
        raise ConfigError("--compare-transformers compares prompts too, which a stream does not bring: drop --stream")
    cases = eval_cases(settings.per_group, settings.seed, settings.skills)
    with _server(settings) as url, _progress("answers", len(cases)) as advance:
        started = time.perf_counter()
        answers = asyncio.run(
            ask_all(
                url,
                served_model(url),
                cases,
                concurrency=settings.concurrency,
                stream=settings.stream,
                seed=settings.seed,
                on_answer=lambda answer: advance(),
            )
        )
        seconds = time.perf_counter() - started
    rows = rows_of(answers)
    how = "streamed" if settings.stream else "not streamed"
    title = f"unseen cases through HTTP, {settings.concurrency} at once, {how}"
    print_table(rows, title, settings.required, console)
    served = settings.url or f"bireme serve {' '.join((settings.model, *settings.flags))}"
    console.print(f"{rows[-1].tokens} output tokens in {seconds:.1f} s by {served}", highlight=False)
    print_wrong(answers, settings.show, console)
    agreement = _compare(settings, answers, console) if settings.compare else None
    failed = sum(answer.error is not None for answer in answers)
    missed = shortfalls(rows, settings.required, agreement)
    if failed:
        first = next(answer.error for answer in answers if answer.error is not None)
        missed.append(f"{failed} cases got no answer; the first: {first}")
    for sentence in missed:
        console.print(f"[red]{sentence}[/red]", highlight=False)
    if settings.as_json or settings.append is not None:
        line = record(
            "eval_pocket",
            model=settings.model,
            flags=list(settings.flags),
            url=settings.url,
            per_group=settings.per_group,
            seed=settings.seed,
            concurrency=settings.concurrency,
            stream=settings.stream,
            seconds=round(seconds, 2),
            prompt_tokens=sum(answer.num_prompt_tokens for answer in answers),
            results={
                row.group: {
                    "cases": row.cases,
                    "right": row.right,
                    "percent": round(row.percent, 2),
                    "tokens": row.tokens,
                    "seconds_per_answer": round(row.seconds, 3),
                }
                for row in rows
            },
            agreement_percent=None if agreement is None else round(agreement, 3),
        )
        emit(line, settings.append)
    return 1 if missed else 0


@contextlib.contextmanager
def _server(settings: Settings) -> Iterator[str]:
    """The address of the given server, or of one of its own, whose log is shown if it does not start."""
    if settings.url is not None:
        yield settings.url.rstrip("/").removesuffix("/v1")
        return
    with tempfile.TemporaryFile() as log:
        try:
            with running_server(settings.model, *settings.flags, log=log) as server:
                yield server.url
        except EngineDeadError as error:
            log.seek(0)
            said = log.read().decode("utf-8", "replace").strip().splitlines()
            raise EngineDeadError(f"{error}; its last line: {said[-1] if said else 'none'}") from error


@contextlib.contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, where that is a terminal; yields what to call for each thing done."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


def _compare(settings: Settings, answers: Sequence[Answer], console: Console) -> float:
    """Print how many cases transformers generates the same tokens for; returns per cent."""
    folder = resolve(settings.model)
    end_ids = frozenset(load_model_config(folder).eos_token_ids)
    cases = [answer.case for answer in answers]
    started = time.perf_counter()
    different: list[Answer] = []
    with _progress("transformers", len(cases)) as advance:
        for answer, tokens in zip(answers, tokens_by_transformers(folder, cases), strict=True):
            if not agrees(answer, *tokens, end_ids):
                different.append(answer)
            advance()
    agreement = 100 * (1 - len(different) / len(answers))
    console.print(
        f"transformers (float32, one at a time, greedy) gives the same tokens in {len(answers) - len(different)} of "
        f"{len(answers)} cases ({agreement:.2f} %); {time.perf_counter() - started:.1f} s",
        highlight=False,
    )
    for answer in different:
        console.print(f"  differs: {answer.case.group}, engine {answer.content!r}", highlight=False, markup=False)
    return agreement


def tokens_by_transformers(folder: str | Path, cases: Sequence[Case]) -> Iterator[tuple[list[int], list[int]]]:
    """Prompt ids and greedily generated ids of each case: transformers' template, tokenizer and model, in float32.

    Raises:
        ConfigError: transformers is not installed.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise ConfigError(f"--compare-transformers needs transformers: {error}") from error
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    for case in cases:
        tools: list[Any] | None = case.tools
        rendered: Any = tokenizer.apply_chat_template(
            case.messages,
            tools=tools,
            enable_thinking=case.enable_thinking,
            add_generation_prompt=True,
            return_dict=False,
        )
        prompt = list(rendered)
        input_ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                do_sample=False,
                max_new_tokens=case.max_tokens,
            )
        yield prompt, output[0, len(prompt) :].tolist()


def agrees(answer: Answer, prompt_ids: Sequence[int], token_ids: Sequence[int], end_ids: frozenset[int]) -> bool:
    """Whether prompt and output are the same tokens; the end token itself may be told or not."""
    return answer.prompt_token_ids == list(prompt_ids) and _trimmed(answer.token_ids, end_ids) == _trimmed(
        token_ids, end_ids
    )


def _trimmed(token_ids: Sequence[int], end_ids: frozenset[int]) -> list[int]:
    ids = list(token_ids)
    while ids and ids[-1] in end_ids:
        ids.pop()
    return ids
