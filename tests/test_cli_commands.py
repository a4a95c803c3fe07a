"""The command line: help, exit codes, one-line errors, and the commands that need no server."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_cli_bench import CONFIG
from typer.testing import CliRunner

from bireme import __version__
from bireme.cli import app
from bireme.cli.serve import startup_summary
from bireme.config import CacheCapacity, EngineConfig, ParallelConfig
from bireme.server.settings import ServerSettings

MODEL = CONFIG.model
TINY = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "head_dim": 16}


def bireme(*args: str, stdin: str = "", timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bireme", *args], input=stdin, capture_output=True, text=True, timeout=timeout
    )


@pytest.mark.parametrize(
    "args",
    [[], ["serve"], ["chat"], ["generate"], ["bench"], ["bench", "decode"], ["eval"], ["eval", "pocket"]],
    ids=" ".join,
)
def test_help_names_every_option_in_full_at_80_columns(args: list[str]) -> None:
    done = CliRunner(env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).invoke(app, [*args, "--help"])
    assert done.exit_code == 0
    assert not re.search(r"--[a-z-]*…", done.output), done.output


def test_help_of_serve_lists_vllms_flags_by_panel() -> None:
    text = CliRunner(env={"TERMINAL_WIDTH": "100"}).invoke(app, ["serve", "--help"]).output
    for flag in (
        *("--tensor-parallel-size", "--tp", "--distributed-backend", "--dtype", "--seed", "--load-format"),
        *("--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--block-size", "--kv-cache-memory-bytes"),
        *("--gpu-memory-utilization", "--enforce-eager", "--served-model-name", "--host", "--port"),
    ):
        assert flag in text
    for panel in ("Model", "Parallelism", "State and KV memory", "Scheduling", "Server"):
        assert f" {panel} " in text


def test_the_version_is_printed() -> None:
    done = bireme("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"bireme {__version__}")


def test_the_start_up_summary_says_what_fits_per_rank() -> None:
    config = EngineConfig(model_path="x", model=MODEL, parallel=ParallelConfig(tp_size=2), dtype="float32")
    capacity = CacheCapacity(
        num_slots=16,
        num_blocks=1000,
        block_size=64,
        max_model_len=4096,
        bytes_per_slot=2**20,
        bytes_per_block=2**17,
        weight_bytes=5 * 2**30,
    )
    settings = ServerSettings(served_model_names=("galley",))
    text = startup_summary(config, settings, capacity, "http://127.0.0.1:8000")
    for part in (
        "galley",
        "1 linear and 1 full attention layers, hidden 32",
        "tensor parallel 2",
        "graphs     none (cpu)",
        "5 GiB weights + 16 MiB state + 125 MiB KV = 5.14 GiB",
        "16 slots of 1 MiB",
        "64000 tokens of 2 KiB in 1000 blocks of 64",
        "16 requests at once, 4096 waiting; 4096 tokens each",
        "API key    none",
        "http://127.0.0.1:8000/v1",
    ):
        assert part in text


def test_the_start_up_summary_counts_keys_and_shows_none() -> None:
    capacity = CacheCapacity(
        num_slots=1, num_blocks=1, block_size=64, max_model_len=64, bytes_per_slot=1, bytes_per_block=64
    )
    settings = ServerSettings(served_model_names=("galley",), api_keys=("sesame", "simsim"))
    text = startup_summary(EngineConfig(model_path="x", model=MODEL, device="cuda"), settings, capacity, "http://x")
    assert "API key    needed (2 known)" in text
    assert "sesame" not in text
    assert "graphs     captured" in text


def assert_one_line_error(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("bireme: error: "), done.stderr
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize("command", [["serve"], ["generate"]], ids=" ".join)
def test_a_missing_folder_is_one_line_and_exit_code_2(command: list[str]) -> None:
    assert_one_line_error(bireme(*command, "./no-such-folder", stdin="x"), 2, "no-such-folder")


def test_a_split_that_does_not_divide_is_refused_with_field_and_numbers(checkpoint: Callable[..., Path]) -> None:
    done = bireme("serve", str(checkpoint(**TINY)), "--tp", "3")
    assert_one_line_error(done, 2, "3 ranks", "--tensor-parallel-size")


def test_a_truncated_checkpoint_is_one_line_and_exit_code_1(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    for path in checkpoint(**TINY).iterdir():
        content = path.read_bytes()
        (tmp_path / path.name).write_bytes(content[: len(content) // 2] if path.suffix == ".safetensors" else content)
    assert_one_line_error(bireme("serve", str(tmp_path)), 1, ".safetensors")


def test_a_port_in_use_is_refused_by_flag_before_a_rank_starts(checkpoint: Callable[..., Path]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = bireme("serve", str(checkpoint(**TINY)), "--port", str(port))
    assert_one_line_error(done, 2, str(port), "--port")


@pytest.mark.parametrize(
    "args",
    [
        ["serve", "x", "--tp", "0"],
        ["serve", "x", "--port", "99999"],
        ["serve", "x", "--dtype", "float8"],
        ["serve", "x", "--gpu-memory-utilization", "1.5"],
        ["serve", "x", "--no-such-flag"],
        ["sail"],
    ],
    ids=" ".join,
)
def test_bad_usage_is_exit_code_2(args: list[str]) -> None:
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 2
    assert "Traceback" not in done.output


def test_generate_streams_the_same_text_for_a_prompt_argument_and_for_stdin(checkpoint: Callable[..., Path]) -> None:
    flags = ["--max-tokens", "12", "--temperature", "0", "--stats"]
    given = bireme("generate", str(checkpoint(**TINY)), "Hello", *flags)
    piped = bireme("generate", str(checkpoint(**TINY)), *flags, stdin="Hello")
    assert given.returncode == piped.returncode == 0, given.stderr + piped.stderr
    assert given.stdout == piped.stdout
    assert given.stdout.strip()
    assert re.search(r"tokens/s", given.stderr)


def test_generate_chat_applies_the_template(checkpoint: Callable[..., Path]) -> None:
    flags = ["--max-tokens", "8", "--temperature", "0"]
    plain = bireme("generate", str(checkpoint(**TINY)), "Hello", *flags)
    chat = bireme("generate", str(checkpoint(**TINY)), "Hello", "--system", "Be brief.", *flags)
    assert plain.returncode == chat.returncode == 0, plain.stderr + chat.stderr
    assert plain.stdout != chat.stdout


def test_generate_refuses_a_bad_parameter_in_one_line(checkpoint: Callable[..., Path]) -> None:
    done = bireme("generate", str(checkpoint(**TINY)), "Hello", "--top-p", "7")
    assert_one_line_error(done, 2, "top_p", "7")


def test_ctrl_c_ends_generate_quietly_and_leaves_no_process(checkpoint: Callable[..., Path]) -> None:
    command = [sys.executable, "-m", "bireme", "generate", str(checkpoint(**TINY)), "Hello", "--ignore-eos"]
    process = subprocess.Popen(
        [*command, "--max-tokens", "3500", "--tp", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.read(1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group, the ranks included
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in errors, errors
    deadline = time.monotonic() + 10
    while group_is_alive(process.pid):
        assert time.monotonic() < deadline, "a process of the group is left"
        time.sleep(0.05)


def group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_bench_decode_prints_a_table_and_one_json_line(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    kept = tmp_path / "results" / "decode.jsonl"
    flags = ["--rows", "4", "--tokens", "8", "--rounds", "1", "--append", str(kept)]
    done = bireme("bench", "decode", str(checkpoint(**TINY)), *flags)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert "batched" in done.stdout
    figures = json.loads(lines[-1])
    assert kept.read_text(encoding="utf-8") == lines[-1] + "\n"
    assert figures["bench"] == "decode"
    assert (figures["rows"], figures["tokens"], figures["tp"]) == (4, 8, 1)
    for name in ("batched_over_per_request", "single_over_bare", "host_ms_per_step", "batched_tok_s"):
        assert figures[name] > 0
    for name in ("commit", "machine", "model", "command"):
        assert name in figures


def copy_of(source: Path, target: Path) -> Path:
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.parametrize("template", ["{% if %}", "{{ x | no_such_filter }}", "{% break %}"])
def test_an_unusable_chat_template_is_refused_before_the_port_opens(
    checkpoint: Callable[..., Path], tmp_path: Path, template: str
) -> None:
    folder = copy_of(checkpoint(**TINY), tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    assert_one_line_error(bireme("serve", str(folder), "--port", "0"), 2, "chat template")


def test_a_cache_too_small_for_one_request_is_refused_before_the_port_opens(checkpoint: Callable[..., Path]) -> None:
    done = bireme("serve", str(checkpoint(**TINY)), "--port", "0", "--kv-cache-memory-bytes", "1000")
    assert_one_line_error(done, 2, "--kv-cache-memory-bytes is 1000", "at least")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["serve", "x", "--port", "99999"], ["--port", "99999", "65535"]),
        (["serve", "x", "--tp", "0"], ["--tp", "0", "1"]),
        (["serve", "x", "--dtype", "float8"], ["--dtype", "float8", "bfloat16"]),
        (["serve", ""], ["empty"]),
        (["generate", "", "x"], ["empty"]),
        (["serve", "pocket", "--served-model-name", ""], ["--served-model-name"]),
    ],
    ids=str,
)
def test_bad_usage_is_one_line_with_flag_value_and_bound(args: list[str], words: list[str]) -> None:
    assert_one_line_error(bireme(*args), 2, *words)


@pytest.mark.parametrize("module", ["bireme.errors", "typer", "numpy", "torch"])
def test_ctrl_c_while_a_module_is_imported_is_quiet_and_130(checkpoint: Callable[..., Path], module: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "bireme", "generate", str(checkpoint(**TINY)), "Hello"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.rpartition("|")[2].strip().partition(module)[1]:
            process.send_signal(signal.SIGINT)
            break
    _, errors = process.communicate(timeout=30)
    assert "Traceback" not in errors
    assert "bireme: interrupted" in errors
    assert process.returncode == 130


def test_importing_the_package_takes_in_nothing_else() -> None:
    code = "import sys, bireme; assert 'msgspec' not in sys.modules; bireme.SamplingParams()"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "> /dev/full"])
def test_generate_with_a_closed_or_full_stream_is_one_line(checkpoint: Callable[..., Path], closed: str) -> None:
    prompt = "" if closed == "<&-" else "Hello"
    done = subprocess.run(
        f"{sys.executable} -m bireme generate {checkpoint(**TINY)} {prompt} --max-tokens 3 {closed}",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert_one_line_error(done, 2 if closed == "<&-" else 1, "std")
