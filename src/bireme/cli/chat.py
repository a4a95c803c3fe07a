"""``bireme chat``: a conversation in the terminal, with a server or with a model in this process."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bireme.cli.options import (
    OUTPUT_PANEL,
    POCKET,
    SAMPLING_PANEL,
    Backend,
    BackendOption,
    CacheBytesOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    EagerOption,
    MaxModelLenOption,
    TpOption,
)
from bireme.cli.presentation import clean_errors, take_interrupts, write
from bireme.errors import BiremeError, ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from bireme.llm import LLM

SERVER_PANEL = "Server (instead of a model in this process)"

PARAMETERS: dict[str, type] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "max_tokens": int,
    "seed": int,
    "thinking": bool,
}
"""What ``/params`` can set; unset means the model's, or the server's, default."""

HELP = """\
/system TEXT          set the system message, and begin anew ("" for none)
/params               show the parameters; /params temperature=0.2 seed= sets and unsets some
/reset                begin anew
/fold                 fold thoughts, or show them again
/quit                 leave (Ctrl-D, too)
A line that ends with \\ goes on in the next; \"\"\" begins and ends a text of several lines.
Ctrl-C stops an answer; a second one leaves."""

Message = dict[str, str]
Piece = tuple[str, str]
"""(thought, content) that came together."""


class Model(ABC):
    """What answers. ``name`` is for people."""

    name: str

    @abstractmethod
    def answer(self, messages: list[Message], params: dict[str, Any]) -> Iterator[Piece]:
        """Stream the answer to a conversation; ``params`` are PARAMETERS that are set.

        Raises:
            InvalidRequestError: the conversation or a parameter is refused.
            BiremeError: the model or the server fails.
        """

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[Interrupt]:
        """While an answer runs, the first Ctrl-C only says so in what this gives; a second one is raised."""
        interrupt = Interrupt()
        before = signal.signal(signal.SIGINT, interrupt.on_signal)
        try:
            yield interrupt
        finally:
            signal.signal(signal.SIGINT, before)

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""


class Interrupt:
    """Whether Ctrl-C came. An engine must not be left in the middle of a step, so it is looked at between pieces."""

    def __init__(self) -> None:
        self.is_set = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handler of SIGINT."""
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True


class LocalModel(Model):
    """A model in this process."""

    def __init__(self, model: str, llm: LLM) -> None:
        self.name = model
        self._llm = llm

    def answer(self, messages: list[Message], params: dict[str, Any]) -> Iterator[Piece]:
        import msgspec

        from bireme.server.chat import ReasoningSplitter

        # Unset, an answer may be as long as the context allows.
        wanted = {"max_tokens": self._llm.config.generation.max_new_tokens, **params}
        thinking = wanted.pop("thinking", None)
        prompt = self._llm.render_chat(messages, **({} if thinking is None else {"enable_thinking": thinking}))
        sampling = msgspec.structs.replace(self._llm.get_default_sampling_params(), **wanted)
        splitter = ReasoningSplitter(prompt)
        with contextlib.closing(self._llm.stream(prompt, sampling)) as pieces:  # type: ignore[type-var]
            for piece in pieces:
                yield splitter.push(piece.text)
        yield splitter.flush()

    def close(self) -> None:
        self._llm.close()


class RemoteModel(Model):
    """A model behind an OpenAI-compatible server.

    Args:
        url: with or without ``/v1``.
        key: the bearer token, if one is needed.
        model: the name to ask for; None for the first that the server lists.

    Raises:
        ConfigError: no such server, or none that answers like one.
    """

    def __init__(self, url: str, key: str | None, model: str | None) -> None:
        import httpx

        base = url.rstrip("/").removesuffix("/v1") + "/v1"
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        # Certificates take long to load, and without TLS none are needed.
        self._client = httpx.Client(
            verify=url.startswith("https:"), headers=headers, timeout=httpx.Timeout(30, read=None)
        )
        self._url = f"{base}/chat/completions"
        try:
            if model is None:
                response = self._client.get(f"{base}/models")
                if response.status_code != 200:
                    raise ConfigError(f"{url} (--url): {_message_of(response.status_code, response.content)}")
                model = str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConfigError(f"cannot reach {url} (--url): {error}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{url} (--url) lists no model at /v1/models") from error
        self._model = model
        self.name = f"{model} at {url}"

    def answer(self, messages: list[Message], params: dict[str, Any]) -> Iterator[Piece]:
        import httpx

        body = {"model": self._model, "messages": messages, "stream": True, **params}
        thinking = body.pop("thinking", None)
        if thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": thinking}
        try:
            with self._client.stream("POST", self._url, json=body) as response:
                if response.status_code != 200:
                    message = _message_of(response.status_code, response.read())
                    raise InvalidRequestError(message) if response.status_code < 500 else BiremeError(message)
                for line in response.iter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line[5:].strip()
                    if data == "[DONE]":
                        return
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise BiremeError(_message_of(200, data.encode()))
                    for choice in chunk.get("choices", []):
                        delta = choice.get("delta") or {}
                        yield delta.get("reasoning_content") or "", delta.get("content") or ""
        except httpx.HTTPError as error:
            raise BiremeError(f"the server does not answer: {error or type(error).__name__}") from error
        except json.JSONDecodeError as error:
            raise BiremeError(f"the server's stream is no JSON: {error}") from error

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[Interrupt]:
        """A wait for the server is cut short by Ctrl-C."""
        yield Interrupt()

    def close(self) -> None:
        self._client.close()


def _message_of(status: int, body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"the server answered {status}"


class Screen:
    """Shows an answer on a terminal: its thought dim or folded, the rest as it is."""

    def __init__(self, *, is_folded: bool) -> None:
        self._is_folded = is_folded
        self._thinks_since: float | None = None

    def show(self, thought: str, content: str) -> None:
        """The next piece."""
        if thought:
            if self._thinks_since is None:
                self._thinks_since = time.monotonic()
                if self._is_folded:
                    write(typer.style("thinking …", dim=True))
            if not self._is_folded:
                write(typer.style(thought, dim=True))
        if content:
            self.end_thought()
            write(content)

    def end_thought(self) -> None:
        """Whatever follows is no thought."""
        if self._thinks_since is not None:
            seconds = time.monotonic() - self._thinks_since
            self._thinks_since = None
            write(typer.style(f"\rthought for {seconds:.1f} s", dim=True) + "\n" if self._is_folded else "\n\n")


class Conversation:
    """Messages, and the parameters of the next answer."""

    def __init__(self, model: Model, system: str | None, params: dict[str, Any], *, is_folded: bool) -> None:
        self.model = model
        self.system = system
        self.params = params
        self.is_folded = is_folded
        self.messages: list[Message] = []

    def ask(self, text: str) -> bool:
        """Answer ``text`` on the terminal; False if Ctrl-C stopped it. What was said until then is kept."""
        self.messages.append({"role": "user", "content": text})
        screen = Screen(is_folded=self.is_folded)
        said = ""
        is_whole = True
        try:
            with self.model.interruptible() as interrupt, contextlib.closing(self.answer()) as pieces:
                for thought, content in pieces:
                    screen.show(thought, content)
                    said += content
                    if interrupt.is_set:
                        is_whole = False
                        break
        except InvalidRequestError:
            self.messages.pop()
            raise
        except KeyboardInterrupt:
            if isinstance(self.model, LocalModel):
                raise
            is_whole = False
        screen.end_thought()
        write("\n" if is_whole else typer.style(" (stopped)", dim=True) + "\n")
        if said or is_whole:
            self.messages.append({"role": "assistant", "content": said})
        else:
            self.messages.pop()
        return is_whole

    def answer(self) -> Any:
        """The pieces of the answer to what has been said."""
        before = [{"role": "system", "content": self.system}] if self.system else []
        return self.model.answer([*before, *self.messages], self.params)

    def obey(self, command: str, rest: str) -> None:
        """A line that began with ``/``."""
        match command:
            case "help":
                write(HELP + "\n")
            case "reset":
                self.messages.clear()
            case "fold":
                self.is_folded = not self.is_folded
                write(f"thoughts are {'folded' if self.is_folded else 'shown'}\n")
            case "system" if rest:
                self.system = None if rest == '""' else rest
                self.messages.clear()
            case "system":
                write(f"{self.system or '(no system message)'}\n")
            case "params":
                self.params = read_params(rest, self.params)
                shown = (f"{name}={self.params.get(name, '')}" for name in PARAMETERS)
                write(" ".join(shown) + "\n")
            case _:
                raise InvalidRequestError(f"there is no /{command}; /help lists what there is")


def read_params(text: str, params: dict[str, Any]) -> dict[str, Any]:
    """``params`` changed by ``name=value`` words; a word without value unsets its parameter.

    Raises:
        InvalidRequestError: an unknown name, or a value of another type.
    """
    changed = dict(params)
    for word in text.split():
        name, _, value = word.partition("=")
        kind = PARAMETERS.get(name)
        if kind is None:
            raise InvalidRequestError(f"{name} is no parameter: there are {', '.join(PARAMETERS)}")
        if not value:
            changed.pop(name, None)
            continue
        try:
            changed[name] = {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)
        except (ValueError, KeyError):
            wanted = "true or false" if kind is bool else "a number" if kind is float else "an integer"
            raise InvalidRequestError(f"{name} is {value!r}: it must be {wanted}") from None
    return changed


def read_input() -> str:
    """What the person types: a line, lines joined by a backslash at their ends, or a text between triple quotes.

    Raises:
        EOFError: nothing more comes.
    """
    line = input("> ")
    if line.lstrip().startswith('"""'):
        text = line.lstrip()[3:]
        while not text.rstrip().endswith('"""'):
            text += "\n" + input(". ")
        return text.rstrip()[:-3].strip("\n")
    while line.endswith("\\"):
        line = line[:-1] + "\n" + input(". ")
    return line


def talk(conversation: Conversation) -> None:
    """Take turns until the person leaves."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() its editing and history
    write(typer.style(f"{conversation.model.name} · /help lists the commands", dim=True) + "\n")
    was_stopped = False
    while True:
        try:
            text = read_input()
        except EOFError:
            write("\n")
            return
        except KeyboardInterrupt:
            write("\n")
            if was_stopped:
                return
            was_stopped = True
            write(typer.style("Ctrl-C again to leave", dim=True) + "\n")
            continue
        was_stopped = False
        command, _, rest = text.strip().partition(" ")
        if command in ("/quit", "/exit"):
            return
        try:
            if command.startswith("/"):
                conversation.obey(command[1:], rest.strip())
            elif text.strip():
                was_stopped = not conversation.ask(text)
        except InvalidRequestError as error:
            typer.echo(f"bireme: {error}", err=True)


def chat(
    url: Annotated[
        str | None,
        typer.Option(
            "--url", metavar="URL", help="Talk to this OpenAI-compatible server.", rich_help_panel=SERVER_PANEL
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            envvar="BIREME_API_KEY",
            help="Its key, if it wants one.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Checkpoint folder, or pocket (if unset). With --url: a name that it serves, its first if unset.",
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="System message.", rich_help_panel=OUTPUT_PANEL)
    ] = None,
    thinking: Annotated[
        bool | None,
        typer.Option(
            "--thinking/--no-thinking",
            help="enable_thinking of the chat template. Unset: as the template has it.",
            show_default=False,
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = None,
    fold: Annotated[
        bool, typer.Option("--fold", help="Say only how long a thought took.", rich_help_panel=OUTPUT_PANEL)
    ] = False,
    params: Annotated[
        str,
        typer.Option(
            "--params",
            metavar="'NAME=VALUE …'",
            help=f"Any of {', '.join(PARAMETERS)}. Unset ones: the model's defaults.",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = "",
    tensor_parallel_size: TpOption = 1,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = "auto",
    enforce_eager: EagerOption = False,
    distributed_backend: BackendOption = Backend.auto,
    kv_cache_memory_bytes: CacheBytesOption = None,
    max_model_len: MaxModelLenOption = None,
) -> None:
    """Chat in the terminal, with a server or with a model in this process. A message on stdin is answered on stdout.

    [bold]bireme chat[/bold]

    [bold]bireme chat --url http://127.0.0.1:8000[/bold]

    [bold]echo "What is 17 + 25?" | bireme chat[/bold]
    """
    with clean_errors():
        if sys.stdin is None or sys.stdout is None:
            raise ConfigError("a chat needs stdin and stdout, and one is closed")
        is_interactive = sys.stdin.isatty()
        if is_interactive and not sys.stdout.isatty():
            raise ConfigError("stdout is no terminal: send the message on stdin to get only the answer")
        message = "" if is_interactive else _read_message()
        wanted = read_params(params, {} if thinking is None else {"thinking": thinking})
        take_interrupts()
        chosen: Model
        if url is not None:
            chosen = RemoteModel(url, api_key, model)
        else:
            from bireme.llm import LLM

            chosen = LocalModel(
                model or POCKET,
                LLM(
                    model or POCKET,
                    tensor_parallel_size=tensor_parallel_size,
                    dtype=dtype.value,
                    device=device,
                    enforce_eager=enforce_eager,
                    distributed_backend=distributed_backend.value,
                    kv_cache_memory_bytes=kv_cache_memory_bytes,
                    max_model_len=max_model_len,
                    max_num_seqs=1,
                ),
            )
        with contextlib.closing(chosen):
            conversation = Conversation(chosen, system, wanted, is_folded=fold)
            if is_interactive:
                talk(conversation)
                return
            conversation.messages.append({"role": "user", "content": message})
            for _, content in conversation.answer():
                write(content)
            write("\n")


def _read_message() -> str:
    try:
        message = sys.stdin.read().strip("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the message from stdin: {error}") from error
    if not message.strip():
        raise ConfigError("there is no message: stdin is empty")
    return message
