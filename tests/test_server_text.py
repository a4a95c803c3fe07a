"""Ids to text: the detokenizer, stop strings, thought and content; each fuzzed against the truth of the whole."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from server_support import MARKUP, TEMPLATE, build_tokenizer
from tokenizers import Tokenizer as FastTokenizer

from bireme.errors import ConfigError, InvalidRequestError
from bireme.server.chat import ChatTemplate, ReasoningSplitter
from bireme.server.detokenizer import Detokenizer
from bireme.server.text_state import RequestText, StopStrings
from bireme.server.tokenizer import Tokenizer
from bireme.types import FinishReason, RequestOutput, SamplingParams

SAMPLES = [
    "hello world",
    "🚢 and 🧭🌊",
    "船は夜明け前に港を出た",
    "배는 새벽이 되기 전에",
    "naïve café — ok",
    "👩‍👩‍👧‍👦 family",
    "𝄞𝄢",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def fast(folder: Path) -> FastTokenizer:
    return FastTokenizer.from_file(str(folder / "tokenizer.json"))


def pieces_of(tokenizer: Tokenizer, token_ids: Sequence[int], **options: object) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)  # type: ignore[arg-type]
    return [detokenizer.push(token_id) for token_id in token_ids]


# ---- tokenizer ----


@pytest.mark.parametrize("skip", [True, False])
def test_decoding_random_ids_equals_the_library(tokenizer: Tokenizer, fast: FastTokenizer, skip: bool) -> None:
    rng = random.Random(1)
    for _ in range(300):
        token_ids = [rng.randrange(tokenizer.num_ids) for _ in range(rng.randint(0, 12))]
        assert tokenizer.decode(token_ids, skip_special_tokens=skip) == fast.decode(token_ids, skip_special_tokens=skip)


def test_long_and_short_texts_are_encoded_alike(tokenizer: Tokenizer, fast: FastTokenizer) -> None:
    text = "The quick 🚢 <|im_end|> brown fox. " * 200
    assert tokenizer.encode(text) == fast.encode(text).ids
    assert tokenizer.encode(text[:50]) == fast.encode(text[:50]).ids


def test_a_token_that_is_part_of_a_character_is_named_by_its_bytes(tokenizer: Tokenizer) -> None:
    names = [tokenizer.token_text(token_id) for token_id in tokenizer.encode("𝄞")]
    assert len(names) > 1
    assert all(name.startswith("bytes:\\x") for name in names)
    assert len({tokenizer.token_text(token_id) for token_id in range(tokenizer.num_ids)}) == tokenizer.num_ids


def test_an_id_without_a_token_has_no_text(tokenizer: Tokenizer) -> None:
    assert pieces_of(tokenizer, [10_000, tokenizer.num_ids]) == ["", ""]
    assert tokenizer.token_text(10_000) == ""


def test_a_missing_or_broken_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json does not exist"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path: Path) -> None:
    from tokenizers import models

    FastTokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="byte-level"):
        Tokenizer.from_folder(tmp_path)


def test_the_template_file_is_preferred_to_the_one_in_the_config(folder: Path, tokenizer: Tokenizer) -> None:
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


# ---- detokenizer ----


@pytest.mark.parametrize("text", SAMPLES)
def test_characters_spread_over_tokens_come_whole_and_never_as_replacement_characters(
    tokenizer: Tokenizer, text: str
) -> None:
    one_byte_each = [tokenizer.token_bytes.index(bytes([byte])) for byte in text.encode()]
    for token_ids in (tokenizer.encode(text), one_byte_each):
        pieces = pieces_of(tokenizer, token_ids)
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("text", SAMPLES)
def test_a_prompt_of_ids_that_ends_inside_a_character_lends_its_bytes(tokenizer: Tokenizer, text: str) -> None:
    token_ids = [tokenizer.token_bytes.index(bytes([byte])) for byte in text.encode()]
    for cut in range(len(token_ids) + 1):
        prompt, output = token_ids[:cut], token_ids[cut:]
        before = "".join(pieces_of(tokenizer, prompt))
        after = "".join(pieces_of(tokenizer, output, prompt_token_ids=prompt))
        assert before + after == text


def test_joined_pieces_equal_the_decoding_of_the_whole_up_to_an_incomplete_end(
    tokenizer: Tokenizer, fast: FastTokenizer
) -> None:
    rng = random.Random(2)
    for _ in range(500):
        token_ids = [rng.randrange(tokenizer.num_ids) for _ in range(rng.randint(1, 15))]
        detokenizer = Detokenizer(tokenizer)
        joined = "".join(map(detokenizer.push, token_ids))
        left = detokenizer.pending.decode("utf-8", "replace")
        assert joined + left == fast.decode(token_ids, skip_special_tokens=True)


def test_special_tokens_are_skipped_and_markup_is_kept(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("<|im_start|>a<think>b</think><tool_call>")
    assert "".join(pieces_of(tokenizer, token_ids)) == "a<think>b</think><tool_call>"
    assert "".join(pieces_of(tokenizer, token_ids, skip_special_tokens=False)).startswith("<|im_start|>a")


def test_markup_that_a_tokenizer_calls_special_is_kept_for_chats(tokenizer: Tokenizer, folder: Path) -> None:
    fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    fast.add_special_tokens(list(MARKUP))
    special = Tokenizer(fast)
    token_ids = special.encode("a<think>b</think>")
    assert special.markup_ids <= special.special_ids
    assert "".join(pieces_of(special, token_ids)) == "ab"
    assert "".join(pieces_of(special, token_ids, kept_ids=special.markup_ids)) == "a<think>b</think>"


# ---- stop strings ----


def stop_truth(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """What a text becomes, read off character by character: the first prefix that ends with a stop string decides."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def test_stop_strings_at_every_cut_give_what_the_whole_gives() -> None:
    rng = random.Random(3)
    for round_ in range(20_000):
        letters = "ab" if round_ % 2 else "abc\n🚢"
        text = "".join(rng.choice(letters) for _ in range(rng.randint(0, 14)))
        stops = ["".join(rng.choice(letters) for _ in range(rng.randint(1, 5))) for _ in range(rng.randint(0, 3))]
        include = rng.random() < 0.5
        state = StopStrings(stops, include_in_output=include)
        shown = ""
        start = 0
        while start < len(text) and state.matched is None:
            end = start + rng.randint(1, 4)
            shown += state.push(text[start:end])
            start = end
        shown += state.flush()
        want, stop = stop_truth(text, stops, include)
        assert (shown, state.matched) == (want, stop), (text, stops, include)


def test_text_that_may_begin_a_stop_string_is_held_back_and_flushed_when_it_does_not() -> None:
    state = StopStrings(["<stop>"])
    assert state.push("a<st") == "a"
    assert state.push("op") == ""
    assert state.push("!<") == "<stop!"
    assert state.flush() == "<"
    assert state.matched is None


def test_what_is_shown_never_holds_part_of_the_stop_string_that_follows() -> None:
    state = StopStrings(["END", "\n\n"])
    shown = [state.push(character) for character in "one\nENEND more"[:9]]
    assert "".join(shown) == "one\nEN"
    assert state.matched == "END"


def test_the_stop_string_that_is_complete_first_wins_and_the_longest_of_those_that_end_together() -> None:
    early = StopStrings(["abcdef", "cd"])
    assert (early.push("xabcdef"), early.matched) == ("xab", "cd")
    together = StopStrings(["d", "bcd", "cd"])
    assert (together.push("abcdz"), together.matched) == ("a", "bcd")


# ---- a request's text ----


def feed(state: RequestText, token_ids: Sequence[int], cuts: Sequence[int], reason: FinishReason) -> str:
    shown = ""
    bounds = [0, *cuts, len(token_ids)]
    for start, end in itertools.pairwise(bounds):
        last = end == len(token_ids)
        shown += state.push(RequestOutput("r", list(token_ids[start:end]), reason if last else None))
        if state.finish_reason is not None:
            break
    return shown


def test_a_requests_text_is_the_same_however_its_tokens_arrive(tokenizer: Tokenizer) -> None:
    rng = random.Random(4)
    for _ in range(800):
        token_ids = tokenizer.encode(
            rng.choice(SAMPLES) + rng.choice(["", " stop", "\n\n", "END"]) + rng.choice(SAMPLES)
        )
        params = SamplingParams(
            max_tokens=None,
            stop=rng.sample(["stop", "\n\n", "END", "🧭", "けまえ", "ld"], rng.randint(0, 3)),
            include_stop_str_in_output=rng.random() < 0.3,
            min_tokens=rng.choice([0, 0, 3]),
        )
        reason = rng.choice([FinishReason.STOP, FinishReason.LENGTH])
        found = set()
        for _ in range(4):
            cuts = sorted(rng.sample(range(1, len(token_ids)), min(rng.randint(0, 6), len(token_ids) - 1)))
            state = RequestText(tokenizer, params)
            shown = feed(state, token_ids, cuts, reason)
            found.add((shown, state.num_tokens, state.finish_reason, state.stop_reason))
        whole = RequestText(tokenizer, params)
        found.add((feed(whole, token_ids, [], reason), whole.num_tokens, whole.finish_reason, whole.stop_reason))
        assert len(found) == 1, (token_ids, params, found)


def test_the_id_that_ends_a_request_is_counted_and_shows_only_when_asked_for(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("hello world")
    hidden = RequestText(tokenizer, SamplingParams())
    assert hidden.push(RequestOutput("r", token_ids, FinishReason.STOP, token_ids[-1])) + "rld" == "hello world"
    assert (hidden.num_tokens, hidden.stop_reason) == (len(token_ids), token_ids[-1])
    shown = RequestText(tokenizer, SamplingParams(include_stop_str_in_output=True))
    assert shown.push(RequestOutput("r", token_ids, FinishReason.STOP, token_ids[-1])) == "hello world"


def test_a_stop_string_ends_the_count_at_the_token_that_completes_it(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("one two three four")
    state = RequestText(tokenizer, SamplingParams(stop=["two"]))
    assert state.push(RequestOutput("r", token_ids)) == "one "
    assert state.finish_reason is FinishReason.STOP
    assert state.stop_reason == "two"
    assert tokenizer.decode(token_ids[: state.num_tokens]).startswith("one two")
    assert state.num_tokens < len(token_ids)
    assert len(state.token_offsets) == state.num_tokens


def test_stop_strings_do_not_count_within_the_first_min_tokens(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("stop and stop again")
    state = RequestText(tokenizer, SamplingParams(stop=["stop"], min_tokens=3, max_tokens=50))
    assert "".join(state.push(RequestOutput("r", [token_id])) for token_id in token_ids[:8]).startswith("stop and")


def test_an_answer_cut_inside_a_character_ends_before_it(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("ok 𝄞")[:-1]
    state = RequestText(tokenizer, SamplingParams())
    assert state.push(RequestOutput("r", token_ids, FinishReason.LENGTH)).strip() == "ok"


# ---- thought and content ----

OPEN, CLOSED, BARE = "x<think>\n", "x<think>\n\n</think>\n\n", "<|im_start|>assistant\n"


def split(prompt: str, pieces: Sequence[str]) -> tuple[str, str]:
    splitter = ReasoningSplitter(prompt)
    both = [splitter.push(piece) for piece in pieces] + [splitter.flush()]
    return "".join(thought for thought, _ in both), "".join(content for _, content in both)


@pytest.mark.parametrize(
    ("prompt", "text", "want"),
    [
        (OPEN, "\nhm\n</think>\n\nyes\n", ("hm", "yes\n")),
        (OPEN, "hm, cut he", ("hm, cut he", "")),
        (OPEN, "hm</thi", ("hm</thi", "")),
        (OPEN, "</think>\n\nyes", ("", "yes")),
        (OPEN, "a < b </think>c</think>", ("a < b ", "c</think>")),
        (CLOSED, "yes", ("", "yes")),
        (CLOSED, "a</think>b <think>", ("", "a</think>b <think>")),
        (BARE, "<think>\nhm\n</think>\n\n  yes", ("hm", "  yes")),
        (BARE, "\n<think>hm", ("hm", "")),
        (BARE, " yes <think>", ("", " yes <think>")),
        (BARE, "<thin", ("", "<thin")),
        ("<think> in a question", "yes", ("", "yes")),
        (OPEN, "", ("", "")),
    ],
)
def test_an_answer_is_split_into_thought_and_content(prompt: str, text: str, want: tuple[str, str]) -> None:
    assert split(prompt, [text]) == want
    assert split(prompt, list(text)) == want


def test_thought_and_content_at_every_cut_are_those_of_the_whole() -> None:
    rng = random.Random(5)
    words = ["<think>", "</think>", "\n", " ", "a", "<", "</", "thi", "think>", "🚢"]
    for _ in range(10_000):
        prompt = rng.choice([OPEN, CLOSED, BARE])
        text = "".join(rng.choice(words) for _ in range(rng.randint(0, 9)))
        pieces, start = [], 0
        while start < len(text):
            end = start + rng.randint(1, 5)
            pieces.append(text[start:end])
            start = end
        assert split(prompt, pieces) == split(prompt, [text]), (prompt, text)


# ---- template ----


def test_the_template_opens_or_closes_the_thought(tokenizer: Tokenizer) -> None:
    template = ChatTemplate.of(tokenizer)
    messages = [{"role": "user", "content": "hi"}]
    assert template.render(messages) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert template.render(messages, enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert template.render(messages, add_generation_prompt=False).endswith("hi<|im_end|>\n")


def test_template_conventions_of_transformers_hold() -> None:
    template = ChatTemplate(
        "{{ eos_token }}{{ tools | tojson(indent=2) }}{% generation %}x{% endgeneration %}\n"
        "    {% for m in messages %}\n{{ m.content }}{% break %}{% endfor %}{{ strftime_now('%Y') | length }}",
        {"eos_token": "</s>"},
    )
    want = '</s>[\n  {\n    "a": "<é>"\n  }\n]xone4'
    assert template.render([{"content": "one"}, {"content": "two"}], tools=[{"a": "<é>"}]) == want


def test_a_template_that_refuses_or_fails_is_the_callers_error() -> None:
    refusing = ChatTemplate("{{ raise_exception('no system message here') }}")
    with pytest.raises(InvalidRequestError, match="no system message here"):
        refusing.render([])
    with pytest.raises(InvalidRequestError, match="failed on these messages"):
        ChatTemplate("{{ messages[0].content + 1 }}").render([{"content": "x"}])


def test_template_variables_cannot_replace_what_the_request_sets() -> None:
    with pytest.raises(InvalidRequestError, match="'documents'"):
        ChatTemplate("x").render([], documents=[])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        ChatTemplate(source).render([{"content": "x"}])


def test_a_template_that_is_no_jinja_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(ConfigError, match="line 1"):
        ChatTemplate("{% for %}")


@pytest.mark.parametrize("template", [[1], {"a": 1}, 3, [{"name": "default"}], [{"name": 1, "template": "x"}]], ids=str)
def test_a_chat_template_of_the_wrong_kind_is_refused(tmp_path: Path, template: Any) -> None:
    build_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: chat_template"):
        Tokenizer.from_folder(tmp_path)


def test_a_list_of_named_chat_templates_is_read(tmp_path: Path) -> None:
    build_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer.from_folder(tmp_path).chat_template == "d"


def test_special_tokens_and_template_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    build_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"id": 1}}')
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: eos_token"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja"):
        Tokenizer.from_folder(tmp_path)
