"""``make demo``: the pocket model on two ranks, sixteen streams at once, whether they are right, what batching buys.

The questions are unseen cases of every skill that the model was trained for, so each answer can be checked exactly; and
each must be the answer that the same question gets alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable

import httpx
from rich.console import Console
from rich.live import Live
from rich.table import Table

from bireme.errors import EngineDeadError
from bireme.local_server import exit_on_sigterm, running_server
from bireme.pocket import NAME
from bireme.pocket.evaluate import Answer, ask
from bireme.pocket.skills import Case, generate

TP_SIZE = 2
SERVE_FLAGS = ("--tp", str(TP_SIZE), "--device", "cpu", "--dtype", "float32")
BENCH_FLAGS = (*SERVE_FLAGS, "--tokens", "32", "--rounds", "1")
SHOWN_CHARACTERS = 160
SEED = 0

QUESTIONS: tuple[tuple[str, int | None], ...] = (
    ("facts", None),
    ("facts", None),
    ("arithmetic", None),
    ("arithmetic", None),
    ("ordering", None),
    ("letters", None),
    ("words", None),
    ("copy", None),
    ("recall", 100),
    ("recall", 1500),
    ("stories", None),
    ("stories", None),
    ("tool_call", None),
    ("tool_answer", None),
    ("json", None),
    ("dialogue", None),
)
"""Skill and, for recall, distance in tokens of each of the sixteen cases."""


def demo_cases() -> list[Case]:
    """The sixteen cases: of each kind the first ones that its generator makes from ``SEED``."""
    streams = {kind: generate(kind[0], "eval", SEED, kind[1]) for kind in dict.fromkeys(QUESTIONS)}
    return [next(streams[kind]) for kind in QUESTIONS]


async def ask_twice(url: str, answers: list[Answer], alone: list[Answer], show: Callable[[Table], None]) -> None:
    """Ask everything at once as streams, showing what has come; then everything again, one after another."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, verify=False, timeout=120, limits=limits) as client:

        async def redraw() -> None:
            while True:
                show(table_of(answers, alone))
                await asyncio.sleep(0.1)

        drawing = asyncio.create_task(redraw())
        await asyncio.gather(*(ask(client, NAME, answer, stream=True) for answer in answers))
        for answer in answers:
            alone.append(await ask(client, NAME, Answer(answer.case)))
        drawing.cancel()
        show(table_of(answers, alone))


def table_of(answers: list[Answer], alone: list[Answer]) -> Table:
    """What has come so far."""
    table = Table(title=f"{len(answers)} streams at once, TP{TP_SIZE}", title_justify="left", expand=True)
    table.add_column("skill", no_wrap=True)
    table.add_column("question", overflow="fold", ratio=3)
    table.add_column("answer", overflow="fold", ratio=2)
    for name in ("tokens", "first", "last"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("right", no_wrap=True)
    table.add_column("alone", no_wrap=True)
    for index, answer in enumerate(answers):
        verdict = same = ""
        if answer.seconds:
            verdict = "[green]yes[/green]" if answer.is_right else "[red]no[/red]"
        if index < len(alone):
            same = "same" if said(answer) == said(alone[index]) else "[red]other[/red]"
        table.add_row(
            answer.case.group,
            _plain(question(answer.case)),
            _plain(said(answer) or answer.thought[-40:]),
            str(answer.num_tokens or ""),
            f"{answer.first_seconds:.2f} s" if answer.first_seconds else "",
            f"{answer.seconds:.2f} s" if answer.seconds else "",
            verdict,
            same,
        )
    return table


def question(case: Case) -> str:
    """The last thing that the user said, on one line and without its middle if it is long."""
    text = next(message["content"] for message in reversed(case.messages) if message["role"] == "user")
    text = " ".join(text.split())
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} … {text[-half:]}"


def said(answer: Answer) -> str:
    """The answer's text, then its tool calls as in Python; or why there is none."""
    if answer.error is not None:
        return answer.error
    calls = []
    for call in answer.tool_calls:
        try:
            arguments = json.loads(call["function"]["arguments"])
            shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        except (ValueError, AttributeError):
            shown = call["function"]["arguments"]
        calls.append(f"{call['function']['name']}({shown})")
    return " ".join([answer.content, *calls]).strip()


def _plain(text: str) -> str:
    """Text that rich shows as it is."""
    return text.replace("[", "\\[")


def main() -> int:
    """Run the demo; 0 when everything checked out."""
    exit_on_sigterm()
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(f"the pocket model, served on {TP_SIZE} ranks: bireme serve {' '.join(SERVE_FLAGS)}", highlight=False)
    answers = [Answer(case) for case in demo_cases()]
    alone: list[Answer] = []
    with tempfile.TemporaryFile() as log:
        try:
            with running_server(NAME, *SERVE_FLAGS, log=log) as server:
                if console.is_terminal:
                    with Live(console=console) as screen:
                        asyncio.run(ask_twice(server.url, answers, alone, screen.update))
                else:
                    asyncio.run(ask_twice(server.url, answers, alone, lambda table: None))
                    console.print(table_of(answers, alone))
                code = server.stop()
        except EngineDeadError as error:
            log.seek(0)
            console.print(log.read().decode("utf-8", "replace"), markup=False, highlight=False)
            console.print(f"[red]{error}[/red]")
            return 1
    total, seconds = sum(answer.num_tokens for answer in answers), max(answer.seconds for answer in answers)
    console.print(f"{total} tokens in {seconds:.2f} s through HTTP: {total / seconds:,.0f} tokens/s", highlight=False)
    num_right = sum(answer.is_right for answer in answers)
    num_same = sum(said(answer) == said(other) for answer, other in zip(answers, alone, strict=True))
    bench = [sys.executable, "-m", "bireme", "bench", "decode", NAME, *BENCH_FLAGS]
    bench_code = subprocess.run(bench, env=os.environ).returncode
    good = num_right == num_same == len(answers) and code == bench_code == 0
    verdict = f"{num_right} of {len(answers)} answers are right, {num_same} the same alone"
    if code != 0 or bench_code != 0:
        verdict += f"; the server ended with code {code}, the benchmark with {bench_code}"
    console.print(f"[{'green' if good else 'red'}]{verdict}[/]", highlight=False)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
