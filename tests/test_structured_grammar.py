"""Forms of answers below the model: what is compiled, which tokens a mask allows, and who pays for it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest
import torch

from bireme.errors import InvalidRequestError
from bireme.pocket import MODEL_DIR
from bireme.sampling import grammar
from bireme.sampling.grammar import GrammarCompiler, GrammarMask, SlotGrammars
from bireme.sampling.params import SlotSampling
from bireme.sampling.processors import apply_mask
from bireme.sampling.sampler import Sampler
from bireme.structured import MAX_GRAMMAR_BYTES, grammar_of, largest_repeat
from bireme.types import NewRequest, SamplingParams, StructuredOutputsParams

VOCAB = 4096
EOS = 4089
EOS_IDS = (EOS, 4087)
ABC = StructuredOutputsParams(choice=["abc", "abd"])


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(MODEL_DIR / "tokenizer.json", VOCAB, EOS_IDS)
    yield made
    made.close()


@pytest.fixture
def slots(compiler: GrammarCompiler) -> SlotGrammars:
    return SlotGrammars(VOCAB, torch.device("cpu"), compiler)


def new(slot: int, form: StructuredOutputsParams | None, **params: object) -> NewRequest:
    return NewRequest(slot, [1, 2], [1], SamplingParams(seed=1, structured_outputs=form, **params), list(EOS_IDS))


def ids(compiler: GrammarCompiler, text: str) -> list[int]:
    return compiler.tokenizer.tokenize_str(text)


def allowed(mask: GrammarMask | None, row: int = 0) -> set[int]:
    assert mask is not None
    bits = np.unpackbits(mask.words[row].numpy().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:VOCAB]).tolist())


def follow(slots: SlotGrammars, slot: int, token_ids: list[int]) -> None:
    """Draw each token in turn; each must be allowed."""
    for token_id in token_ids:
        mask = slots.finish([slot])
        assert mask is None or token_id in allowed(mask)
        slots.observe([slot], [token_id])


# forms and their refusals


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ({"json": {"type": "object"}}, '{"a": [1, null]}', '{"a": [1, null}'),
        ({"json": '{"type": "integer", "minimum": 7}'}, "8", "6"),
        ({"json": "true"}, '["x"]', "x"),
        ({"json_object": True}, "{}", "[]"),
        ({"regex": r"\d{2}/[a-c]+"}, "12/ab", "12/xy"),
        ({"choice": ['a "b"', "ü\n"]}, "ü\n", "u"),
        ({"grammar": 'start: "x" NUM\nNUM: /[0-9]+/'}, "x42", "y42"),
        ({"grammar": 'root ::= "x" [0-9]+ | "z"'}, "z", "x"),
        ({"json_object": True, "begins_after": "</think>"}, '\n\n{"a": 1}', '\n\n\n{"a": 1}'),
    ],
)
def test_each_form_takes_what_it_must_and_nothing_else(
    compiler: GrammarCompiler, form: dict[str, object], good: str, bad: str
) -> None:
    compiled = compiler.compile(StructuredOutputsParams(**form))  # type: ignore[arg-type]
    for text, fits in ((good, True), (bad, False)):
        matcher = compiled.matcher.deep_copy()
        token_ids = ids(compiler, text)
        taken = matcher.try_consume_tokens(token_ids)
        assert (taken == len(token_ids) and matcher.is_accepting()) is fits, text


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (
            {"json": {"properties": {"a/b": {"items": {"not": {}}}}}},
            ['#/properties/a~1b/items: Unimplemented keys: ["not"]'],
        ),
        (
            {"json": {"$defs": {"n": {"format": "nope"}}, "items": {"$ref": "#/$defs/n"}}},
            ["#/items: Unknown format: nope"],
        ),
        ({"json": {"oneOf": [{}, {"type": "string"}]}}, ["oneOf constraints are not supported."]),
        ({"json": {"$ref": "#"}}, ["nothing satisfies it"]),
        ({"json": {"$ref": "#"}, "begins_after": "</think>"}, ["nothing satisfies it"]),
        ({"json": {"type": "strin"}}, ["Invalid type: strin"]),
        ({"json": "{"}, ["no valid JSON"]),
        ({"json": "3"}, ["an object"]),
        ({"json": {"x-guidance": {"lenient": True}}}, ["x-guidance"]),
        ({"regex": "(?=a)b"}, ["look-around"]),
        ({"regex": "a\\"}, ["ends in a single backslash"]),
        ({"grammar": "start: nothing"}, ['unknown name: "nothing"']),
        ({"grammar": "root ::= " + "(" * 5000}, ["no GBNF"]),
    ],
)
def test_a_form_that_cannot_be_followed_is_refused_with_the_reason_and_the_place(
    compiler: GrammarCompiler, form: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(StructuredOutputsParams(**form, field="the_field"))  # type: ignore[arg-type]
    assert caught.value.param == "the_field"
    assert str(caught.value).startswith("the_field ")
    for word in words:
        assert word in str(caught.value)
    assert "coerce_one_of" not in str(caught.value)
    assert "\n" not in str(caught.value)


BOMBS = {
    "too long": {"json": {"enum": [f"value number {i}" for i in range(20_000)]}},
    "many names": {"json": {"properties": {f"p{i}": {"type": "string"} for i in range(6_000)}}},
    "nested repeats": {"json": {"type": "string", "pattern": "^((a{1000}){1000}){1000}$"}},
    "repeats in a part": {"json": {"anyOf": [{"patternProperties": {"(ab){1000000}": {}}}]}},
    "repeats": {"regex": "(ab){300000}"},
    "product": {"json": {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(8)]} for i in range(8)]}},
    "intersections": {"json": {"allOf": [{"type": "string", "pattern": f".*x{i}.{{50}}y.*"} for i in range(8)]}},
    "deep": {"json": '{"items":' * 5_000 + "{}" + "}" * 5_000},
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_schema_that_would_take_for_ever_is_refused_while_others_go_on(compiler: GrammarCompiler, name: str) -> None:
    longest = 0.0
    is_over = threading.Event()

    def beat() -> None:
        nonlocal longest
        last = time.monotonic()
        while not is_over.wait(0.001):
            now = time.monotonic()
            longest, last = max(longest, now - last), now

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        form = StructuredOutputsParams(**BOMBS[name])  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError):
            compiler.prepare(form).result(timeout=20)
    finally:
        is_over.set()
        thread.join()
    assert longest < 2.0  # the interpreter lock was never held for long


def test_the_limit_of_length_is_in_bytes_and_says_both_numbers() -> None:
    text = "ü" * (MAX_GRAMMAR_BYTES // 2 + 1)
    with pytest.raises(InvalidRequestError, match=f"{len(text.encode())} bytes: at most {MAX_GRAMMAR_BYTES}"):
        grammar_of(StructuredOutputsParams(choice=[text]))


@pytest.mark.parametrize(
    ("pattern", "count"),
    [("(ab{3}){4,9}", 12), ("a{2}b{3}", 3), (r"\({3}", 3), ("[{100}]{3}", 3), ("a{,5}", 1), ("(a{3}|b{5}){2}c", 10)],
)
def test_repeats_are_counted_through_groups_and_not_in_classes(pattern: str, count: int) -> None:
    assert largest_repeat(pattern) == count


def test_forms_prepared_by_many_threads_at_once_are_compiled_once_each(compiler: GrammarCompiler) -> None:
    forms = [StructuredOutputsParams(regex=f"{number}[a-z]{{3}}") for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        futures = list(pool.map(lambda number: compiler.prepare(forms[number % 8]), range(64)))
    wait(futures)
    made = {id(future.result()) for future in futures}
    assert len(made) == 8
    assert all(compiler.get(form) is futures[number].result() for number, form in enumerate(forms))


def test_a_form_that_somebody_holds_outlives_the_cache(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "CACHED_GRAMMARS", 2)
    held = compiler.prepare(ABC)
    held.result()
    for number in range(4):
        compiler.prepare(StructuredOutputsParams(regex=f"x{number}")).result()
    assert compiler.get(ABC) is held.result()


def test_a_checkpoint_without_tokenizer_or_end_token_says_so(tmp_path: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"no tokenizer\.json"):
        GrammarCompiler(f"{tmp_path}/tokenizer.json", VOCAB, EOS_IDS)
    with pytest.raises(InvalidRequestError, match="no end token"):
        GrammarCompiler(MODEL_DIR / "tokenizer.json", VOCAB, ())


# masks


def test_the_end_token_is_allowed_exactly_when_the_form_is_complete(slots: SlotGrammars) -> None:
    slots.install(new(1, StructuredOutputsParams(regex="ab*")))
    assert slots.compiler is not None
    a, b = ids(slots.compiler, "a")[0], ids(slots.compiler, "b")[0]
    assert a in allowed(slots.finish([1])) and not allowed(slots.finish([1])) & set(EOS_IDS)
    slots.observe([1], [a])
    assert {b, *EOS_IDS} <= allowed(slots.finish([1])) and a not in allowed(slots.finish([1]))
    slots.observe([1], [EOS])
    assert slots.finish([1]) is None  # whatever a late step draws here is discarded
    assert slots.failures([1]) is None


def test_a_complete_form_allows_nothing_but_the_end_tokens(slots: SlotGrammars) -> None:
    assert slots.compiler is not None
    slots.install(new(1, ABC))
    follow(slots, 1, ids(slots.compiler, "abd"))
    assert allowed(slots.finish([1])) == set(EOS_IDS)


def test_min_tokens_holds_the_end_back_as_long_as_anything_else_is_left(slots: SlotGrammars) -> None:
    assert slots.compiler is not None
    slots.install(new(1, StructuredOutputsParams(regex="ab*"), min_tokens=3))
    slots.install(new(2, ABC, min_tokens=9))
    a, b = ids(slots.compiler, "a")[0], ids(slots.compiler, "b")[0]
    slots.observe([1], [a])
    assert b in allowed(slots.finish([1])) and not allowed(slots.finish([1])) & set(EOS_IDS)
    follow(slots, 1, [b, b])
    assert set(EOS_IDS) <= allowed(slots.finish([1]))
    follow(slots, 2, ids(slots.compiler, "abd"))
    assert allowed(slots.finish([2])) == set(EOS_IDS)


@pytest.mark.parametrize(
    ("end", "rest"),
    [(["</think>"], "\n\nabc"), ([*"</think>"], "abd"), ([*"x</think", ">\n"], "\nabc"), ([*"</think", ">\n"], "abc")],
)
def test_after_a_thought_the_form_begins_wherever_the_thoughts_end_was_cut(
    slots: SlotGrammars, end: list[str], rest: str
) -> None:
    assert slots.compiler is not None
    tokenizer = slots.compiler.tokenizer
    token_of = {tokenizer.decode_bytes([token_id]).decode(errors="replace"): token_id for token_id in range(VOCAB)}
    slots.install(new(1, StructuredOutputsParams(choice=["abc", "abd"], begins_after="</think>")))
    for token_id in [*ids(slots.compiler, "so {</thin k> \n"), *(token_of[piece] for piece in end)]:
        assert slots.finish([1]) is None  # a thought is free, and costs nothing
        slots.observe([1], [token_id])
    follow(slots, 1, ids(slots.compiler, rest))
    assert allowed(slots.finish([1])) == set(EOS_IDS)
    assert slots.failures([1]) is None


def test_only_rows_with_a_form_have_a_mask_and_the_others_logits_stay_as_they_are(slots: SlotGrammars) -> None:
    assert slots.compiler is not None
    slots.install(new(2, ABC))
    slots.install(new(5, None))
    assert slots.concerns([5, 2]) and not slots.concerns([5, 1])
    assert slots.finish([1, 5]) is None
    mask = slots.finish([5, 2, 1])
    assert mask is not None and mask.rows.tolist() == [1]
    logits = torch.randn(3, VOCAB)
    before = logits.clone()
    apply_mask(logits, mask.rows, mask.words)
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    left = torch.isfinite(logits[1])
    assert set(torch.nonzero(left).flatten().tolist()) == allowed(mask)
    assert torch.equal(logits[1][left], before[1][left])


def test_a_mask_of_an_odd_width_is_applied_bit_by_bit() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 71, generator=generator)
    words = torch.randint(-(2**31), 2**31, (2, 3), generator=generator).to(torch.int32)
    expected = logits.clone()
    for number, row in enumerate((3, 0)):
        for token_id in range(71):
            if not (int(words[number, token_id // 32]) >> (token_id % 32)) & 1:
                expected[row, token_id] = -torch.inf
    apply_mask(logits, torch.tensor([3, 0]), words)
    assert torch.equal(logits, expected)


def test_a_slot_that_was_released_keeps_nothing_and_its_next_owner_begins_anew(slots: SlotGrammars) -> None:
    assert slots.compiler is not None
    slots.install(new(1, ABC))
    follow(slots, 1, ids(slots.compiler, "abd")[:1])
    slots.release(1)
    assert slots.num_rows == 0 and not slots.concerns([1])
    slots.install(new(1, ABC))
    first = allowed(slots.finish([1]))
    slots.install(new(1, None))
    assert slots.finish([1]) is None
    slots.install(new(1, ABC))
    assert allowed(slots.finish([1])) == first


def test_a_row_whose_mask_is_late_fails_alone(slots: SlotGrammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MASK_SECONDS", 0.2)
    may_go_on = threading.Event()
    slots.install(new(1, ABC))
    slots.install(new(2, ABC))
    monkeypatch.setattr(slots._rows[1], "matcher", _Stuck(may_go_on), raising=True)
    mask = slots.finish([1, 2])
    assert mask is not None and mask.rows.tolist() == [1]
    failed = slots.failures([1, 2])
    assert failed is not None and list(failed) == [1] and "takes more than" in failed[1]
    may_go_on.set()
    assert slots.finish([1, 2]) is not None and slots.failures([2]) is None
    slots.release(1)
    assert slots.failures([1]) is None


class _Stuck:
    """A matcher that does not come back for a while."""

    def __init__(self, may_go_on: threading.Event) -> None:
        self._may_go_on = may_go_on

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
        assert self._may_go_on.wait(20)

    def is_error(self) -> bool:
        return False


# the sampler


def test_a_row_draws_from_its_mask_and_its_neighbours_draw_what_they_draw_without_it(
    compiler: GrammarCompiler,
) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    positions = torch.zeros(3, dtype=torch.int64)

    def draw(form: StructuredOutputsParams | None, params: dict[str, object]) -> list[int]:
        sampler = Sampler(
            SlotSampling(3, VOCAB, torch.device("cpu")), SlotGrammars(VOCAB, torch.device("cpu"), compiler)
        )
        for slot in (1, 2, 3):
            sampler.install(new(slot, form if slot == 2 else None, **params))
        return sampler(logits.clone(), [1, 2, 3], positions).token_ids.tolist()

    for params in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}, {"top_k": 3}):
        free, bound = draw(None, params), draw(StructuredOutputsParams(regex="[0-9]"), params)
        assert bound[0] == free[0] and bound[2] == free[2]
        assert compiler.tokenizer.decode_str([bound[1]]) in "0123456789"


def test_logprobs_are_those_of_the_models_own_distribution_before_the_mask(compiler: GrammarCompiler) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    expected = torch.log_softmax(logits[0].double(), 0)
    sampler = Sampler(SlotSampling(1, VOCAB, torch.device("cpu")), SlotGrammars(VOCAB, torch.device("cpu"), compiler))
    sampler.install(new(1, StructuredOutputsParams(regex="[0-9]"), temperature=0.0, logprobs=1))
    sampled = sampler(logits, [1], torch.zeros(1, dtype=torch.int64))
    entries = sampled.logprobs()
    assert entries is not None and entries[0] is not None
    assert entries[0].logprob == pytest.approx(float(expected[entries[0].token_id]), abs=1e-5)
    assert entries[0].rank > 1 and entries[0].top_ids == [int(expected.argmax())]


def test_a_form_with_no_compiler_is_a_defect_that_shows() -> None:
    with pytest.raises(ValueError, match="slot 1"):
        SlotGrammars(VOCAB, torch.device("cpu"), None).install(new(1, ABC))


def test_params_travel_and_the_same_form_is_the_same_key() -> None:
    import msgspec

    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert back == params and hash(back.structured_outputs) == hash(params.structured_outputs)
    assert list(json.loads(back.structured_outputs.json)["properties"]) == ["b", "a"]  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("given", [{}, {"json": {}, "regex": "a"}, {"choice": []}, {"choice": [""]}, {"regex": ""}])
def test_no_form_two_forms_and_empty_forms_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError):
        StructuredOutputsParams(**given)  # type: ignore[arg-type]


def test_ignore_eos_contradicts_a_form() -> None:
    with pytest.raises(InvalidRequestError, match="ignore_eos"):
        SamplingParams(ignore_eos=True, structured_outputs=ABC)
