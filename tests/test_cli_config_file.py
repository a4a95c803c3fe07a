"""``bireme serve --config``: the file's options, the command line's precedence, and what is refused by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bireme.cli import app
from bireme.cli import serve as serve_module
from bireme.errors import ConfigError


class Stopped(ConfigError):
    """Ends ``serve`` once its options are known."""


@pytest.fixture
def options_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A function from the text of a file and further arguments to what ``serve`` is run with."""
    seen: dict[str, Any] = {}

    def stop(model: str, **options: Any) -> None:
        seen.update(options, model=model)
        raise Stopped("seen")

    monkeypatch.setattr(serve_module, "engine_config", stop)
    path = tmp_path / "server.yaml"

    def run(text: str, *args: str) -> dict[str, Any]:
        seen.clear()
        path.write_text(text, encoding="utf-8")
        done = CliRunner().invoke(app, ["serve", "--config", str(path), *args])
        assert seen, done.output
        return dict(seen)

    return run


def test_a_file_sets_options_by_their_long_names(options_of: Any) -> None:
    options = options_of(
        "model: ./somewhere\ntensor-parallel-size: 2\ndtype: bfloat16\nenforce_eager: true\n"
        "gpu-memory-utilization: 0.5\nmax-num-seqs: null\n"
    )
    assert options["model"] == "./somewhere"
    assert (options["tensor_parallel_size"], options["dtype"], options["enforce_eager"]) == (2, "bfloat16", True)
    assert (options["gpu_memory_utilization"], options["max_num_seqs"]) == (0.5, None)


def test_the_command_line_wins_also_by_another_name_of_an_option(options_of: Any) -> None:
    text = "model: ./somewhere\ntensor-parallel-size: 2\nseed: 5\n"
    options = options_of(text, "./elsewhere", "--tp", "4")
    assert (options["model"], options["tensor_parallel_size"], options["seed"]) == ("./elsewhere", 4, 5)


def test_an_empty_file_changes_nothing_and_a_flag_that_is_false_stays_unset(options_of: Any) -> None:
    assert options_of("") == options_of("enforce-eager: false\n# a comment\n")


def serve(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "bireme", "serve", *args], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 8000", ["prot is no option", "did you mean port?"]),
        ("config: x.yaml", ["config is no option"]),
        ("help: true", ["help is no option"]),
        ("1: 2", ["1 is no option"]),
        ("port: http", ["port is 'http': it must be an integer"]),
        ("port: 8000.5", ["port is 8000.5: it must be an integer"]),
        ("port: yes", ["port is True: it must be an integer"]),
        ("port: [1, 2]", ["port is [1, 2]: it must be an integer"]),
        ("port: 99999", ["--port", "99999", "65535"]),
        ("dtype: float8", ["--dtype", "float8", "bfloat16"]),
        ("api-key: 123", ["api-key is 123: it must be a string", "quotes"]),
        ("served-model-name: [a, 1]", ["served-model-name is 1"]),
        ("enforce-eager: 1", ["enforce-eager is 1: it must be true or false"]),
        ("port: 1\nport: 2", ["port is set twice"]),
        ("tp: 1\ntensor-parallel-size: 2", ["tensor-parallel-size is set twice"]),
        ("- port", ["must hold options"]),
        ("port: [", ["no valid YAML"]),
        ("model: !!python/object:os.system x", ["no valid YAML"]),
    ],
    ids=str,
)
def test_what_a_file_cannot_say_is_one_line_with_the_file_and_the_name(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(text, encoding="utf-8")
    done = serve("--config", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("bireme: error: ")
    for word in [str(path), *words]:
        assert word in done.stderr


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = serve("--config", str(tmp_path / "none.yaml"))
    assert done.returncode == 2
    assert f"cannot read {tmp_path / 'none.yaml'} (--config): No such file" in done.stderr
