"""Random submit / abort / step operations: whatever happens, one terminal each and nothing leaked."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_helpers import EOS, drain, engine, plans, request, terminals, tokens

from bireme.types import FinishReason

SUBMIT = st.tuples(
    st.just("submit"),
    st.sampled_from([1, 2, 3, 4, 63, 64, 65, 130, 257, 700]),
    st.sampled_from([1, 2, 5, 30, 64, 65, 200, None]),
    st.booleans(),
)
ABORT = st.tuples(st.just("abort"), st.integers(0, 60))
STEP = st.tuples(st.just("step"), st.integers(1, 6))


def script(prompt, position):
    """Ends some requests by eos, at a place that depends on the prompt."""
    return EOS if position == len(prompt) % 7 * 5 + 1 else (len(prompt) * 31 + position) % 500


def expected(length: int, max_tokens: int | None, ignore_eos: bool, max_model_len: int) -> list[int]:
    limit = max_model_len - length if max_tokens is None else max_tokens
    found = []
    for position in range(limit):
        found.append(script([0] * length, position))
        if found[-1] == EOS and not ignore_eos:
            break
    return found


@settings(max_examples=500, deadline=None)
@given(
    operations=st.lists(st.one_of(SUBMIT, SUBMIT, ABORT, STEP, STEP), max_size=70),
    depth=st.sampled_from([1, 2]),
    num_slots=st.sampled_from([1, 2, 5]),
    num_blocks=st.sampled_from([8, 13, 40]),
    budget=st.sampled_from([64, 65, 512, 2048]),
)
def test_random_operations_end_with_one_terminal_each_and_everything_free(
    operations, depth, num_slots, num_blocks, budget
):
    max_model_len = 512
    core = engine(
        num_slots=num_slots,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        budget=budget,
        depth=depth,
        script=script,
        max_waiting=12,
    )
    seen = defaultdict(list)
    submitted = {}
    aborted = set()

    def take(outputs):
        for output in outputs:
            seen[output.request_id].append(output)

    for operation in operations:
        if operation[0] == "submit":
            _, length, max_tokens, ignore_eos = operation
            name = f"r{len(submitted)}"
            submitted[name] = (length, max_tokens, ignore_eos, max_model_len)
            core.add_request(request(name, length, max_tokens=max_tokens, ignore_eos=ignore_eos))
        elif operation[0] == "abort":
            aborted.add(f"r{operation[1]}")
            core.abort(f"r{operation[1]}")
        else:
            for _ in range(operation[1]):
                take(core.step())
        core.scheduler.check_invariants()
    for name, outputs in drain(core).items():
        seen[name] += outputs

    assert seen.keys() == submitted.keys()
    for name, outputs in seen.items():
        (last,) = terminals(outputs)
        assert last is outputs[-1]
        whole = expected(*submitted[name]) if last.finish_reason is not FinishReason.ERROR else []
        if last.finish_reason is FinishReason.ABORT:
            assert name in aborted and tokens(outputs) == whole[: len(tokens(outputs))]
        else:
            assert tokens(outputs) == whole
            assert (last.finish_reason is FinishReason.ERROR) == bool(last.is_invalid or last.is_overloaded)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), min_size=2, max_size=25),
    depth=st.sampled_from([1, 2]),
    num_blocks=st.sampled_from([6, 20]),
)
def test_requests_are_admitted_in_order_of_arrival(lengths, depth, num_blocks):
    core = engine(num_slots=3, num_blocks=num_blocks, max_model_len=380, depth=depth, budget=128)
    for index, (length, max_tokens) in enumerate(lengths):
        core.add_request(request(f"r{index}", length, max_tokens=max_tokens))
    drain(core)
    admitted = [len(new.prompt_token_ids) for plan in plans(core) for new in plan.new_requests]
    assert admitted == [length for length, _ in lengths]


@settings(max_examples=300, deadline=None)
@given(
    fault=st.sampled_from(["fail_submit_seq", "fail_collect_seq", "wrong_seq"]),
    seq=st.integers(0, 30),
    depth=st.sampled_from([1, 2]),
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=12),
    aborts=st.lists(st.integers(0, 11), max_size=4),
)
def test_a_failure_at_any_step_leaves_one_terminal_each(fault, seq, depth, lengths, aborts):
    core = engine(num_slots=3, depth=depth, budget=64, **{fault: seq})
    ends = defaultdict(int)
    for index, length in enumerate(lengths):
        core.add_request(request(f"r{index}", length, max_tokens=8))
    while core.has_unfinished:
        if core.stats().num_steps == 2:
            for index in aborts:
                core.abort(f"r{index}")
        for output in core.step():
            assert not ends[output.request_id], "an output after the end"
            ends[output.request_id] += output.finish_reason is not None
    assert ends == {f"r{index}": 1 for index in range(len(lengths))}
    core.ledger.assert_settled()
