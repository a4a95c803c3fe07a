"""EngineCore on the simulated executor: what is refused, how requests end, what a failure does."""

from __future__ import annotations

import msgspec
import pytest
from scheduler_helpers import EOS, drain, engine, plans, request, terminals, tokens

from bireme.engine import EngineCore, check_request
from bireme.errors import EngineDeadError, InvalidRequestError
from bireme.sim import SimExecutor, sim_capacity
from bireme.types import FinishReason, Request, SamplingParams

LIMITS = sim_capacity(num_slots=4, num_blocks=4, block_size=64, max_model_len=200)


def ids(*token_ids, **params) -> Request:
    return Request("a", list(token_ids), SamplingParams(**params))


BAD = [
    (ids(), "prompt", "the prompt is empty"),
    (ids(1, 512), "prompt", r"token id 512 at position 1: ids must be in \[0, 512\)"),
    (ids(-1), "prompt", "token id -1 at position 0"),
    (ids(2**31), "prompt", "token id 2147483648"),
    (ids(1, "2"), "prompt", "not an integer"),
    (ids(1, 2.5), "prompt", "not an integer"),
    (ids(True), "prompt", "not an integer"),
    (ids(1, None), "prompt", "not an integer"),
    (ids(*[1] * 200), "prompt", "has 200 tokens: at most 199 fit .* context of 200 .*--max-model-len"),
    (ids(*[1] * 5000), "prompt", "has 5000 tokens: at most 199"),
    (ids(*[1] * 199, max_tokens=2), "max_tokens", "199 tokens and max_tokens is 2: together 201, .* 200 .*--max-mod"),
    (ids(1, max_tokens=200), "max_tokens", "together 201"),
    (ids(1, 2, max_tokens=None, min_tokens=199), "min_tokens", "min_tokens is 199.* leaves 198"),
    (ids(1, stop_token_ids=[512]), "stop_token_ids", "stop_token_ids holds token id 512"),
    (ids(1, stop_token_ids=[3, 2**31 - 1]), "stop_token_ids", "2147483647"),
    (ids(1, logit_bias={512: 1.0}), "logit_bias", "logit_bias holds token id 512"),
    (ids(1, n=2), "n", "n is 2"),
]


@pytest.mark.parametrize(("bad", "param", "message"), BAD, ids=[message for _, _, message in BAD])
def test_a_bad_request_is_refused_with_its_field_and_the_numbers(bad, param, message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        check_request(bad, 512, LIMITS)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "good",
    [
        ids(0),
        ids(511),
        ids(*[1] * 199, max_tokens=1),
        ids(1, max_tokens=199),
        ids(*[1] * 199, max_tokens=None),
        ids(1, stop_token_ids=[0, 511], logit_bias={0: 1.0, 511: -100.0}),
    ],
)
def test_a_request_at_the_bounds_is_accepted(good):
    check_request(good, 512, LIMITS)


def test_a_request_larger_than_the_whole_cache_is_refused_with_both_numbers():
    tight = msgspec.structs.replace(LIMITS, num_blocks=2)
    with pytest.raises(InvalidRequestError, match=r"room for 129 tokens .* cache holds 128 .*--kv-cache-memory-bytes"):
        check_request(ids(1, max_tokens=129), 512, tight)
    check_request(ids(1, max_tokens=128), 512, tight)


@pytest.mark.parametrize("bad", [bad for bad, _, _ in BAD])
def test_a_bad_request_ends_with_one_error_and_the_next_good_one_is_served(bad):
    core = engine(max_model_len=200)
    core.add_request(bad)
    core.add_request(request("good", 2, max_tokens=3))
    seen = drain(core)
    (only,) = seen["a"]
    assert only.finish_reason is FinishReason.ERROR and only.is_invalid and only.error and not only.token_ids
    assert tokens(seen["good"]) == [1, 2, 1]


def test_a_refused_request_says_which_field_was_at_fault():
    core = engine()
    core.add_request(ids(1, stop_token_ids=[600]))
    (only,) = core.step()
    assert only.error_param == "stop_token_ids"
    assert not core.has_unfinished


def test_an_id_in_use_is_refused_and_leaves_its_first_request_alone():
    core = engine()
    core.add_request(request("a", 2, max_tokens=4))
    core.add_request(request("a", 3, max_tokens=4))
    outputs = drain(core)["a"]
    refused = [output for output in outputs if output.is_invalid]
    assert [output.error_param for output in refused] == ["request_id"]
    assert tokens(outputs) == [1, 2, 1, 2]
    core.add_request(request("a", 2, max_tokens=1))
    assert tokens(drain(core)["a"]) == [1]


def test_a_full_queue_refuses_with_its_own_mark():
    core = engine(num_slots=1, max_waiting=2)
    for name in "abcd":
        core.add_request(request(name, 2, max_tokens=2))
    seen = drain(core)
    (only,) = seen["d"]
    assert only.is_overloaded and not only.is_invalid and only.finish_reason is FinishReason.ERROR
    assert "--max-waiting" in only.error
    assert tokens(seen["b"]) == [1, 2]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("params", "expected", "reason", "stop_reason"),
    [
        (dict(), [5, 6, EOS], FinishReason.STOP, None),
        (dict(ignore_eos=True), [5, 6, EOS, 8, 9], FinishReason.LENGTH, None),
        (dict(stop_token_ids=[6]), [5, 6], FinishReason.STOP, 6),
        (dict(stop_token_ids=[EOS]), [5, 6, EOS], FinishReason.STOP, None),
        (dict(stop_token_ids=[EOS], ignore_eos=True), [5, 6, EOS], FinishReason.STOP, EOS),
        (dict(stop_token_ids=[9]), [5, 6, EOS], FinishReason.STOP, None),
        (dict(max_tokens=2), [5, 6], FinishReason.LENGTH, None),
        (dict(max_tokens=3), [5, 6, EOS], FinishReason.STOP, None),
        (dict(stop_token_ids=[6], min_tokens=3), [5, 7, EOS + 1, 8, 9], FinishReason.LENGTH, None),
        (dict(stop_token_ids=[6, 8], min_tokens=1), [5, 6], FinishReason.STOP, 6),
    ],
)
def test_how_a_request_ends(depth, params, expected, reason, stop_reason):
    core = engine(depth=depth, script=lambda prompt, position: [5, 6, EOS, 8, 9][position])
    core.add_request(request("a", 3, **({"max_tokens": 5} | params)))
    outputs = drain(core)["a"]
    assert tokens(outputs) == expected
    (last,) = terminals(outputs)
    assert last is outputs[-1] and (last.finish_reason, last.stop_reason) == (reason, stop_reason)
    assert last.error is None


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_steps", range(7))
def test_an_abort_at_any_moment_gives_one_abort_and_frees_everything(depth, num_steps):
    core = engine(depth=depth, budget=64, num_slots=2)
    core.add_request(request("a", 150, max_tokens=40))  # prefill takes three steps
    core.add_request(request("b", 5, max_tokens=6))
    outputs = []
    for _ in range(num_steps):
        outputs += core.step()
    core.abort("a")
    core.abort("a")
    core.scheduler.check_invariants()
    seen = drain(core)
    of_a = [output for output in outputs if output.request_id == "a"] + seen["a"]
    assert [output.finish_reason for output in terminals(of_a)] == [FinishReason.ABORT]
    assert of_a[-1].finish_reason is FinishReason.ABORT
    assert tokens([output for output in outputs if output.request_id == "b"] + seen["b"]) == [1, 2, 3, 4, 5, 1]


def test_aborting_one_that_waits_lets_the_next_one_in():
    core = engine(num_slots=2, num_blocks=4, max_model_len=256)
    core.add_request(request("a", 64, max_tokens=65))
    core.add_request(request("big", 128, max_tokens=100))
    core.add_request(request("small", 2, max_tokens=1))
    core.step()
    core.abort("big")
    assert "small" in {output.request_id for output in core.step()}
    drain(core)


def test_an_abort_of_an_unknown_id_is_ignored():
    core = engine()
    core.abort("nobody")
    assert not core.has_unfinished
    core.add_request(request("a", 2, max_tokens=1))
    drain(core)
    core.abort("a")
    assert not core.has_unfinished


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("fault", ["fail_submit_seq", "fail_collect_seq", "wrong_seq"])
@pytest.mark.parametrize("seq", [0, 1, 3])
def test_a_failing_executor_ends_every_open_request_with_one_error(depth, fault, seq):
    core = engine(depth=depth, num_slots=2, budget=64, **{fault: seq})
    names = ["a", "b", "c", "d"]
    for name, length in zip(names, (100, 3, 3, 3), strict=True):
        core.add_request(request(name, length, max_tokens=9))
    core.abort("d")
    outputs = []
    for _ in range(20):
        outputs += core.step()
        if core.is_dead:
            break
    for name in names:
        mine = [output for output in outputs if output.request_id == name]
        (last,) = terminals(mine)
        assert last is mine[-1]
        assert last.finish_reason is (FinishReason.ABORT if name == "d" else FinishReason.ERROR)
        assert bool(last.error) == (name != "d") and not last.is_invalid
    core.ledger.assert_settled()
    assert not core.has_unfinished and core.error
    with pytest.raises(EngineDeadError, match="the engine is dead: "):
        core.step()
    with pytest.raises(EngineDeadError):
        core.add_request(request("late"))
    core.abort("a")
    assert core.fail("again") == []
    assert core.check() == []


def test_a_rank_that_is_gone_is_noticed_while_idle():
    core = engine(fail_check_after=1)
    assert core.check() == [] and not core.is_dead
    assert core.check() == [] and core.is_dead


def test_fail_gives_outputs_that_were_not_given_yet_and_then_errors():
    core = engine()
    for name in "ab":
        core.add_request(request(name, 2, max_tokens=4))
    core.abort("a")
    outputs = core.fail("the loop broke")
    assert [(o.request_id, o.finish_reason, o.error) for o in outputs] == [
        ("a", FinishReason.ABORT, None),
        ("b", FinishReason.ERROR, "the loop broke"),
    ]


def test_a_defect_in_the_loop_loses_no_terminal_output():
    class Broken(SimExecutor):
        def collect(self):
            raise ZeroDivisionError

    sound = engine()
    core = EngineCore(sound.config, Broken(sound.executor.capacity))
    for name in "ab":
        core.add_request(request(name, 2, max_tokens=4))
    core.abort("a")
    with pytest.raises(ZeroDivisionError):
        core.step()
    assert [output.request_id for output in core.fail("broken")] == ["a", "b"]


def test_shutdown_ends_what_is_open_and_closes_the_executor():
    core = engine()
    core.add_request(request("a", 2, max_tokens=9))
    core.step()
    assert [output.finish_reason for output in core.shutdown()] == [FinishReason.ABORT]
    assert core.executor.is_shut_down
    assert core.shutdown() == []
    with pytest.raises(EngineDeadError, match="shut down"):
        core.add_request(request("b"))


def test_the_configured_limits_bind_where_they_are_below_the_executors_capacity():
    wide = engine(num_slots=2, max_model_len=100)
    core = EngineCore(wide.config, SimExecutor(sim_capacity(num_slots=50, max_model_len=9999)))
    assert (core.capacity.num_slots, core.capacity.max_model_len) == (2, 100)
    narrow = EngineCore(wide.config, SimExecutor(sim_capacity(num_slots=1, max_model_len=50)))
    assert (narrow.capacity.num_slots, narrow.capacity.max_model_len) == (1, 50)


@pytest.mark.parametrize("depth", [1, 2])
def test_logprobs_travel_with_the_rows_that_asked(depth):
    core = engine(depth=depth)
    core.add_request(request("with", 2, max_tokens=3, logprobs=2))
    core.add_request(request("without", 2, max_tokens=3))
    seen = drain(core)
    assert all(output.logprobs is None for output in seen["without"])
    for output in seen["with"]:
        (entry,) = output.logprobs
        assert entry.token_id == output.token_ids[0] and len(entry.top_ids) == 2


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [1, 2, 64, 65, 200])
def test_prompt_logprobs_accumulate_over_chunks_and_come_once_with_the_first_token(depth, length):
    core = engine(depth=depth, budget=64)
    core.add_request(request("other", 5, max_tokens=3))
    core.add_request(request("a", length, max_tokens=3, prompt_logprobs=0))
    outputs = drain(core)["a"]
    first, *rest = outputs[0].prompt_logprobs
    assert first is None
    assert [entry.token_id for entry in rest] == request("a", length).prompt_token_ids[1:]
    assert all(output.prompt_logprobs is None for output in outputs[1:])


def test_stats_count_tokens_steps_and_time():
    core = engine(budget=64, step_seconds=0.001, num_slots=1)
    core.add_request(request("a", 100, max_tokens=4))
    core.add_request(request("b", 1, max_tokens=1))
    core.step()
    now = core.stats()
    assert (now.num_running, now.num_waiting, now.num_slots, now.num_free_slots) == (1, 1, 1, 0)
    assert now.num_blocks - now.num_free_blocks == 2
    drain(core)
    end = core.stats()
    assert (end.num_prefill_tokens, end.num_decode_tokens, end.num_steps) == (101, 3, 6)
    assert (end.num_running, end.num_waiting, end.num_free_slots) == (0, 0, 1)
    assert end.model_seconds == pytest.approx(0.006)
    assert end.host_seconds > 0


def test_the_loop_keeps_two_plans_in_flight_and_only_one_without_depth():
    for depth, ahead in ((1, 1), (2, 2)):
        core = engine(depth=depth)
        core.add_request(request("a", 3, max_tokens=10))
        core.step()
        assert len(plans(core)) == ahead
        drain(core)
        assert tokens(drain(core)["a"]) == []


def test_outputs_are_the_same_whatever_the_depth():
    def run(depth: int) -> dict[str, list[int]]:
        core = engine(
            depth=depth, num_slots=3, budget=128, script=lambda prompt, position: (len(prompt) + position) % 512
        )
        for index in range(12):
            core.add_request(request(f"r{index}", 1 + 37 * index % 180, max_tokens=40, stop_token_ids=[90 + index]))
        return {name: tokens(outputs) for name, outputs in drain(core).items()}

    assert run(1) == run(2)


def test_the_idle_check_notices_an_open_request():
    core = engine()
    core.add_request(request("a"))
    with pytest.raises(RuntimeError, match="never ended"):
        core.assert_idle()
