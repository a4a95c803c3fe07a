"""/tokenize and /detokenize on the simulated engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server_support import build_tokenizer, load_tokenizer, running_server

from bireme.server.tokenizer import Tokenizer

MANY = "hello 🚢 船は夜明け前に <|im_start|> world"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokens")
    build_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def http(folder: Any) -> Iterator[httpx.Client]:
    with running_server(folder, folder) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(folder: Any) -> Tokenizer:
    return load_tokenizer(folder)


def test_a_text_becomes_ids_and_the_ids_that_text(http: httpx.Client, tokenizer: Tokenizer) -> None:
    there = http.post("/tokenize", json={"model": "tiny", "prompt": MANY}).json()
    assert there == {
        "count": len(there["tokens"]),
        "max_model_len": 2048,
        "tokens": tokenizer.encode(MANY),
        "token_strs": None,
    }
    assert http.post("/detokenize", json={"model": "tiny", "tokens": there["tokens"]}).json() == {"prompt": MANY}
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    assert http.post("/tokenize", json={"prompt": ""}).json()["count"] == 0


def test_the_texts_of_tokens_come_when_asked_for(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "one two three", "return_token_strs": True}).json()
    assert "".join(answer["token_strs"]) == "one two three"
    assert len(answer["token_strs"]) == answer["count"]


def test_a_conversation_becomes_what_a_chat_would_use(http: httpx.Client) -> None:
    for options in ({}, {"chat_template_kwargs": {"enable_thinking": False}}, {"add_generation_prompt": False}):
        ids = http.post("/tokenize", json=CHAT | options).json()["tokens"]
        chat = CHAT | options | {"max_tokens": 1, "return_token_ids": True}
        assert http.post("/v1/chat/completions", json=chat).json()["prompt_token_ids"] == ids


def test_a_long_text_is_tokenized_beyond_the_context(http: httpx.Client) -> None:
    assert http.post("/tokenize", json={"prompt": "one two " * 3000}).json()["count"] > 2048


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x"} | CHAT, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"prompt": "x", "tools": []}, "tools"),
        ("/tokenize", CHAT | {"add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", CHAT | {"continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"prompt": "x", "max_tokens": 5}, "max_tokens"),
        ("/tokenize", {"messages": [{"role": "robot"}]}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1, 640]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"prompt": "x"}, "prompt"),
    ],
)
def test_bad_input_is_refused_by_name(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_a_model_that_is_not_served_is_not_found(http: httpx.Client) -> None:
    assert http.post("/tokenize", json={"model": "gpt-x", "prompt": "x"}).status_code == 404
    assert http.post("/detokenize", json={"model": "gpt-x", "tokens": [1]}).status_code == 404
