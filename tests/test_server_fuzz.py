"""Malformed requests of every kind, made from the server's own schema: no 5xx, no hang, and the next answer is right.

The number of requests is BIREME_FUZZ_CASES (``make fuzz``: 5,000), and each run of that many has a seed that it prints.
"""

from __future__ import annotations

import json
import os
import random
import string
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_support import RunningServer, build_tokenizer, running_server

from bireme import local_server

CASES = int(os.environ.get("BIREME_FUZZ_CASES", "400"))
SEED = int(os.environ.get("BIREME_FUZZ_SEED", "0"))
PROBE = {"prompt": "<|say|>all is well<|said|>", "max_tokens": 20}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
EXTREMES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**63) - 1,
    10**40,
    0.5,
    -0.0,
    1e308,
    "",
    "x",
    "\x00",
    "\ud800",
    "é" * 3000,
    "none",
    "auto",
    [],
    [[]],
    [None],
    [[[[1]]]],
    {},
    {"": {}},
    {"type": "object"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "(" * 50}}},
    [{"role": "user", "content": "x"}],
    [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "[" * 999}}]}],
    [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"$ref": "#/properties/a"}}}}}],
    [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}],
    [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]}],
    [{"type": "reasoning", "summary": []}],
    {"json": {"type": "object", "properties": {"a": {"enum": []}}}},
    {"regex": "(a|b"},
    {"choice": []},
    {"grammar": "root ::= root"},
]


class Fuzzer:
    """Bodies near to good ones: each has some fields that are not what they should be."""

    def __init__(self, seed: int, schemas: dict[str, dict[str, Any]]) -> None:
        self._random = random.Random(seed)
        self._schemas = schemas

    def case(self) -> tuple[str, bytes, dict[str, str]]:
        """Path, body, headers."""
        pick = self._random
        path = pick.choice(list(self._schemas))
        headers = {"content-type": "application/json"}
        properties = self._schemas[path]["properties"]
        body = dict(GOOD[path])
        for _ in range(pick.choice((1, 1, 1, 2, 3, 6))):
            name = pick.choice(list(properties)) if pick.random() < 0.95 else self._text()
            body[name] = self._of_schema(properties.get(name, {})) if pick.random() < 0.4 else self._value(3)
        if pick.random() < 0.05:
            body.pop(pick.choice(list(body)))
        # Python writes what JSON cannot say, too: NaN, infinities and lone surrogates.
        raw = json.dumps(body, ensure_ascii=pick.random() < 0.5).encode("utf-8", "surrogatepass")
        if pick.random() < 0.15:
            raw = self._broken(raw)
        if pick.random() < 0.05:
            headers["content-type"] = pick.choice(
                ("text/plain", "application/json; charset=latin-1", "", "multipart/x")
            )
        if pick.random() < 0.05:
            headers["x-request-id"] = pick.choice(("a b", "x" * 300, "fine-1"))
        return path, raw, headers

    def _value(self, depth: int) -> Any:
        pick = self._random
        kind = pick.random()
        if kind < 0.5 or not depth:
            return pick.choice(EXTREMES)
        if kind < 0.6:
            return pick.choice((float("nan"), float("inf"), pick.uniform(-1e6, 1e6), pick.randint(-(2**70), 2**70)))
        if kind < 0.7:
            return self._text()
        if kind < 0.85:
            return [self._value(depth - 1) for _ in range(pick.choice((1, 2, 40)))]
        return {self._text(): self._value(depth - 1) for _ in range(pick.choice((1, 2, 40)))}

    def _of_schema(self, schema: dict[str, Any]) -> Any:
        """Something of the right type, whose value may still be wrong."""
        pick = self._random
        if "anyOf" in schema:
            return self._of_schema(pick.choice(schema["anyOf"]))
        if "enum" in schema:
            return pick.choice(schema["enum"])
        match schema.get("type"):
            case "integer":
                return pick.choice((-(2**40), -2, -1, 0, 1, 2, 20, 21, 129, 2**31, 2**62))
            case "number":
                return pick.choice((-1e9, -2.5, -1.0, 0.0, 1e-9, 0.5, 1.0, 2.0, 101.0, 1e300))
            case "boolean":
                return pick.random() < 0.5
            case "string":
                return pick.choice(("", "x", "required", "none", self._text()))
            case "array":
                return [self._of_schema(schema.get("items", {})) for _ in range(pick.choice((0, 1, 2, 40)))]
            case "object":
                properties = schema.get("properties", {})
                made = {name: self._of_schema(each) for name, each in properties.items() if pick.random() < 0.7}
                return made or {self._text(): self._of_schema(schema.get("additionalProperties") or {})}
        return self._value(2)

    def _text(self) -> str:
        alphabet = string.printable + "é船🚢\x00\u202e<>{}\"'\\"
        return "".join(self._random.choices(alphabet, k=self._random.choice((0, 1, 5, 300))))

    def _broken(self, raw: bytes) -> bytes:
        pick = self._random
        at = pick.randrange(len(raw))
        return pick.choice(
            (
                raw[:at],
                raw[:at] + bytes([pick.randrange(256)]) + raw[at + 1 :],
                raw + raw,
                b"",
                b"[" * 50_000,
                b"\xff" + raw,
            )
        )


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("fuzz")
    build_tokenizer(folder)
    with running_server(folder, folder, settings={"request_timeout": 20.0}) as running:
        yield running


def send_them_all(url: str, num_cases: int, golden_call: tuple[str, dict[str, Any]]) -> None:
    """Malformed requests, eight at a time; then the golden call must be answered as before them."""
    with httpx.Client(base_url=url, timeout=30, limits=httpx.Limits(max_connections=8), verify=False) as http:
        paths = http.get("/openapi.json").json()["paths"]
        schemas = {path: paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"] for path in GOOD}
        path, body = golden_call
        golden = http.post(path, json=body).json()["choices"]
        fuzzer = Fuzzer(SEED, schemas)
        cases = [fuzzer.case() for _ in range(num_cases)]

        def send(case: tuple[str, bytes, dict[str, str]]) -> int:
            path, raw, headers = case
            answer = http.post(path, content=raw, headers=headers)
            wrong = f"{path} {headers} {raw[:3000]!r} gave {answer.status_code}: {answer.text[:1000]}"
            assert answer.status_code in (200, 400, 404, 413, 415), wrong
            if answer.status_code != 200:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, wrong
                assert len(answer.content) < 4000, wrong
            for secret in ("Traceback", str(Path(__file__).parents[1]), "site-packages"):
                assert secret not in answer.text, wrong
            return answer.status_code

        with ThreadPoolExecutor(8) as pool:
            statuses = Counter(pool.map(send, cases))
        print(f"seed {SEED}, {num_cases} requests: {dict(statuses)}")
        # Most must be malformed, and some must get through, or the fuzzer looks in the wrong place.
        assert statuses[400] > num_cases / 2
        assert statuses[200] > num_cases / 50
        assert http.post(path, json=body).json()["choices"] == golden
        assert http.get("/health").status_code == 200


@pytest.mark.timeout(max(300, CASES // 4))
def test_malformed_requests_never_cost_more_than_their_own_answer(simulated: RunningServer) -> None:
    send_them_all(simulated.url, CASES, ("/v1/completions", PROBE))
    simulated.wait_for("vllm:num_requests_running", 0)
    assert simulated.metric("bireme_state_slots_free") == simulated.metric("bireme_state_slots_total")
    assert simulated.metric("bireme_kv_blocks_free") == simulated.metric("bireme_kv_blocks_total")
    assert "Traceback" not in simulated.log.read_text()


@pytest.mark.timeout(max(300, CASES // 4))
def test_malformed_requests_do_not_change_what_a_real_model_answers(tmp_path: Path) -> None:
    question = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "logprobs": True,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    log = tmp_path / "server.log"
    with log.open("wb") as out, local_server.running_server("pocket", "--dtype", "float32", log=out) as server:
        send_them_all(server.url, CASES, ("/v1/chat/completions", question))
    assert "Traceback" not in log.read_text()
