"""``bireme chat``: what a pipe gets, what a person at a terminal sees, and what commands and Ctrl-C do."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from bireme.cli.chat import read_params
from bireme.errors import InvalidRequestError

CHAT = [sys.executable, "-m", "bireme", "chat"]


class FakeServer(ThreadingHTTPServer):
    """Answers like an OpenAI server: it thinks, then says what it was told, slowly and for long if that is ``slow``."""

    daemon_threads = True

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        super().__init__(("127.0.0.1", 0), FakeHandler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class FakeHandler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "parrot"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        text = body["messages"][-1]["content"]
        if text == "bad":
            self.reply(400, {"error": {"message": "this is refused"}})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        with contextlib.suppress(OSError):
            if text == "broken":
                self.event({"error": {"message": "the engine died"}})
                return
            self.event({"choices": [{"delta": {"role": "assistant", "reasoning_content": "let me think"}}]})
            for _ in range(1000 if text == "slow" else 1):
                self.event({"choices": [{"delta": {"content": f"you said {text}"}}]})
                time.sleep(0.05 if text == "slow" else 0)
            self.event({"choices": []})
            self.wfile.write(b"data: [DONE]\n\n")

    def event(self, value: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()

    def reply(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def piped(*args: str, stdin: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CHAT, *args], input=stdin, capture_output=True, text=True, timeout=120)


class Terminal:
    """A chat at a terminal of its own."""

    def __init__(self, *args: str) -> None:
        self._fd, other = pty.openpty()
        environment = {**os.environ, "TERM": "dumb"}
        self.process = subprocess.Popen(
            [*CHAT, *args], stdin=other, stdout=other, stderr=other, env=environment, start_new_session=True
        )
        os.close(other)
        self.seen = ""

    def wait_for(self, pattern: str, seconds: float = 60) -> str:
        """Everything up to the end of the first match behind what was waited for before."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen, re.DOTALL)):
            assert time.monotonic() < deadline, f"{pattern!r} did not come; there is {self.seen!r}"
            ready, _, _ = select.select([self._fd], [], [], 0.1)
            if ready:
                try:
                    self.seen += os.read(self._fd, 65536).decode()
                except OSError:
                    assert re.search(pattern, self.seen, re.DOTALL), f"the chat ended; there is {self.seen!r}"
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def leave(self) -> int:
        """The exit code."""
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            os.close(self._fd)


def test_a_message_on_stdin_is_answered_on_stdout_and_nothing_else_is_printed() -> None:
    done = piped(stdin="What is 17 + 25?\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "42\n", "")


def test_a_server_answers_with_its_first_model_and_its_thought_stays_out_of_the_pipe(fake: FakeServer) -> None:
    done = piped("--url", fake.url, "--system", "Be brief.", "--params", "temperature=0.5 top_k=3", stdin="hello\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "you said hello\n", "")
    (body,) = fake.bodies
    assert body["model"] == "parrot"
    assert (body["temperature"], body["top_k"], "max_tokens" in body) == (0.5, 3, False)
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
    ]


def test_thinking_travels_as_a_template_variable_and_the_name_as_given(fake: FakeServer) -> None:
    assert piped("--url", f"{fake.url}/v1/", "--model", "other", "--no-thinking", stdin="x").returncode == 0
    assert fake.bodies[0]["model"] == "other"
    assert fake.bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("args", "stdin", "code", "word"),
    [
        (["--url", "http://127.0.0.1:9"], "hello", 2, "cannot reach http://127.0.0.1:9"),
        (["--params", "temprature=1"], "hello", 2, "temprature is no parameter"),
        (["--params", "top_k=x"], "hello", 2, "top_k is 'x': it must be an integer"),
        (["--params", "top_p=7"], "hello", 2, "top_p is 7.0"),
        ([], " \n", 2, "there is no message"),
        (["--model", "./no-such-folder"], "hello", 2, "no-such-folder"),
    ],
)
def test_what_cannot_be_done_is_one_line(args: list[str], stdin: str, code: int, word: str) -> None:
    done = piped(*args, stdin=stdin)
    assert (done.returncode, done.stdout) == (code, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("bireme: error: ")
    assert word in done.stderr


@pytest.mark.parametrize(("text", "code", "word"), [("bad", 2, "this is refused"), ("broken", 1, "the engine died")])
def test_a_servers_refusal_and_its_failure_are_one_line_each(fake: FakeServer, text: str, code: int, word: str) -> None:
    done = piped("--url", fake.url, stdin=text)
    assert (done.returncode, done.stderr) == (code, f"bireme: error: {word}\n")


def test_turns_commands_and_several_lines_at_a_terminal(fake: FakeServer) -> None:
    chat = Terminal("--url", fake.url)
    chat.wait_for("parrot at .*> ")
    chat.type("one\n")
    assert "let me think" in chat.wait_for("you said one")
    chat.wait_for("> ")
    chat.type("two \\\nthree\n")
    chat.wait_for("you said two ")
    chat.type('"""\nfour\nfive\n"""\n')
    chat.wait_for("you said four")
    assert [message["content"] for message in fake.bodies[-1]["messages"]] == [
        "one",
        "you said one",
        "two \nthree",
        "you said two \nthree",
        "four\nfive",
    ]
    chat.type("/params temperature=0.25\n")
    chat.wait_for(r"temperature=0.25 top_k= ")
    chat.type("/params temprature=1\n")
    chat.wait_for("temprature is no parameter")
    chat.type("/system Be kind.\n/system\n")
    chat.wait_for("Be kind[.]\r?\n.*Be kind[.]")
    chat.type("/fold\n")
    chat.wait_for("thoughts are folded")
    chat.type("six\n")
    assert "let me think" not in chat.wait_for("you said six")
    assert fake.bodies[-1]["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "six"},
    ]
    assert fake.bodies[-1]["temperature"] == 0.25
    chat.type("/reset\n/nonsense\n")
    chat.wait_for("there is no /nonsense")
    chat.type("bad\n")
    chat.wait_for("this is refused")
    chat.type("seven\n")
    chat.wait_for("you said seven")
    assert len(fake.bodies[-1]["messages"]) == 2, "what was refused is no part of the conversation"
    chat.type("/quit\n")
    assert chat.leave() == 0


def test_ctrl_c_stops_a_servers_answer_and_a_second_one_leaves(fake: FakeServer) -> None:
    chat = Terminal("--url", fake.url)
    chat.wait_for("> ")
    chat.type("slow\n")
    chat.wait_for("you said slow.*you said slow")
    chat.interrupt()
    chat.wait_for("stopped.*> ")
    chat.type("more\n")
    chat.wait_for("you said more")
    roles = [message["role"] for message in fake.bodies[-1]["messages"]]
    assert roles == ["user", "assistant", "user"], "what had been said is kept"
    chat.wait_for("> ")
    chat.interrupt()
    chat.wait_for("again to leave.*> ")
    chat.interrupt()
    assert chat.leave() == 0


def test_ctrl_c_stops_the_answer_of_a_model_in_this_process_which_goes_on_answering() -> None:
    chat = Terminal("--params", "temperature=0")
    chat.wait_for("pocket .*> ")
    chat.type("Sort these numbers: " + ", ".join(str(n) for n in range(99, 10, -1)) + "\n")
    chat.wait_for(r"\x1b\[2m9")
    chat.interrupt()
    chat.wait_for("stopped.*> ")
    chat.type("/reset\n")
    chat.wait_for("> ")
    chat.type("What is 17 + 25?\n")
    chat.wait_for(r"\n42\r?\n.*> ")
    chat.type("\x04")
    assert chat.leave() == 0


def test_parameters_are_set_and_unset_by_words() -> None:
    params = read_params("temperature=0.5 seed=3 thinking=false", {"top_k": 2})
    assert params == {"top_k": 2, "temperature": 0.5, "seed": 3, "thinking": False}
    assert read_params("temperature= top_k", params) == {"seed": 3, "thinking": False}
    with pytest.raises(InvalidRequestError, match="thinking is '1': it must be true or false"):
        read_params("thinking=1", {})
