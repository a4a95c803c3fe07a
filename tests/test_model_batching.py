"""A row's result depends on nothing but its own tokens: not on neighbours, chunks, slots, blocks or padding."""

from __future__ import annotations

import pytest
import torch
from model_tools import TOLERANCE, Driver, load_model, write_model
from torch import Tensor

from bireme.models.qwen3_5 import Qwen3_5ForCausalLM

PROMPT_LENGTHS = [1, 2, 3, 4, 63, 64, 65, 130]
NUM_DECODE_ROWS = 7
NUM_STEPS = 130


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Qwen3_5ForCausalLM:
    folder = tmp_path_factory.mktemp("model")
    return load_model(folder, write_model(folder, "kv2_group6_ratio3_untied_6_layers", seed=1))


def random_ids(model: Qwen3_5ForCausalLM, count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (count,), generator=generator).tolist()


def alone(model: Qwen3_5ForCausalLM, token_ids: list[int]) -> Tensor:
    """Logits at every position of a sequence run by itself, in one piece, on fresh memory."""
    driver = Driver(model)
    driver.open(1, len(token_ids))
    return driver.step(prefill=[(1, token_ids)])[1][0]


@pytest.fixture(scope="module")
def prompts(model) -> list[tuple[list[int], Tensor]]:
    ids = [random_ids(model, length, seed=length) for length in PROMPT_LENGTHS]
    return [(tokens, alone(model, tokens)) for tokens in ids]


@pytest.fixture(scope="module")
def conversations(model) -> list[tuple[int, list[int], Tensor]]:
    """(prompt length, token ids, logits alone) of the rows that decode beside the chunks."""
    result = []
    for row in range(NUM_DECODE_ROWS):
        num_prompt = [5, 64, 1, 70, 33, 63, 2][row]
        tokens = random_ids(model, num_prompt + NUM_STEPS, seed=1000 + row)
        result.append((num_prompt, tokens, alone(model, tokens)))
    return result


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    error = (found - expected).abs().max().item()
    assert error < TOLERANCE, f"{what}: off by {error:.1e}"


@pytest.mark.parametrize("num_decode", [0, 1, NUM_DECODE_ROWS])
@pytest.mark.parametrize("chunk", [1, 2, 63, 64, 65, 128])
def test_packed_ragged_prompts_in_chunks_beside_decode_rows_equal_their_solo_runs(
    model, prompts, conversations, chunk, num_decode
):
    driver = Driver(model, seed=chunk)
    decoding = list(enumerate(conversations[:num_decode], start=1))
    for slot, (_, tokens, _) in decoding:
        driver.open(slot, len(tokens))
    prompt_slots = {20 - index: case for index, case in enumerate(prompts)}
    for slot, (tokens, _) in prompt_slots.items():
        driver.open(slot, len(tokens))
    driver.fill_with_nan()
    if decoding:
        driver.step(prefill=[(slot, tokens[:count]) for slot, (count, tokens, _) in decoding])
    found: dict[int, list[Tensor]] = {slot: [] for slot in prompt_slots}
    while rows := [
        (slot, tokens[driver.lengths[slot] : driver.lengths[slot] + chunk])
        for slot, (tokens, _) in prompt_slots.items()
        if driver.lengths[slot] < len(tokens)
    ]:
        decode = [(slot, tokens[driver.lengths[slot]]) for slot, (_, tokens, _) in decoding]
        at = [driver.lengths[slot] for slot, _ in decode]
        decoded, chunks = driver.step(decode=decode, prefill=rows)
        for (slot, (_, _, expected)), position, logits in zip(decoding, at, decoded, strict=True):
            assert_close(logits, expected[position], f"decode row in slot {slot}, position {position}")
        for (slot, _), logits in zip(rows, chunks, strict=True):
            found[slot].append(logits)
    for slot, (tokens, expected) in prompt_slots.items():
        assert_close(torch.cat(found[slot]), expected, f"prompt of {len(tokens)} tokens")


@pytest.mark.parametrize("leftover", ["nan", "former state"])
def test_a_freed_slot_and_its_blocks_are_not_seen_by_their_next_owner(model, prompts, leftover):
    for tokens, expected in prompts:
        driver = Driver(model, num_slots=1, num_blocks=3)
        driver.open(1, 150)
        driver.step(prefill=[(1, random_ids(model, 150, seed=5))])
        driver.close(1)
        if leftover == "nan":
            driver.fill_with_nan()
        driver.open(1, len(tokens))
        _, (logits,) = driver.step(prefill=[(1, tokens)])
        assert_close(logits, expected, f"prompt of {len(tokens)} tokens")


@pytest.mark.parametrize("num_before", [1, 64, 128])
def test_a_one_token_last_chunk_is_not_a_decode_row(model, conversations, num_before):
    """It shares a step with decode rows whose slots lie around its own, and resumes its own state."""
    driver = Driver(model)
    tokens = random_ids(model, num_before + 1, seed=77)
    expected = alone(model, tokens)
    neighbours = [(1, conversations[0]), (3, conversations[1])]
    for slot, (count, neighbour, _) in neighbours:
        driver.open(slot, len(neighbour))
        driver.step(prefill=[(slot, neighbour[:count])])
    driver.open(2, len(tokens))
    driver.step(prefill=[(2, tokens[:num_before])])
    decode = [(slot, neighbour[count]) for slot, (count, neighbour, _) in neighbours]
    decoded, (last,) = driver.step(decode=decode, prefill=[(2, tokens[num_before:])])
    assert_close(last[0], expected[num_before], "the last chunk")
    for row, (slot, (count, _, solo)) in enumerate(neighbours):
        assert_close(decoded[row], solo[count], f"decode row in slot {slot}")


@pytest.mark.parametrize("padding_state", ["zeros", "nan"])
def test_padding_rows_change_no_live_row_and_no_live_slot(model, conversations, padding_state):
    plain, padded = Driver(model), Driver(model)
    for driver in (plain, padded):
        for slot, (_, tokens, _) in enumerate(conversations, start=1):
            driver.open(slot, len(tokens))
        driver.step(prefill=[(slot, tokens[:count]) for slot, (count, tokens, _) in enumerate(conversations, start=1)])
        if padding_state == "nan":
            driver.fill_with_nan()
    for _ in range(3):
        decode = [(slot, conversations[slot - 1][1][plain.lengths[slot]]) for slot in range(1, 1 + len(conversations))][
            :4
        ]
        expected, _ = plain.step(decode=decode)
        found, _ = padded.step(decode=decode, padding=5)
        assert_close(found, expected, "decode rows beside padding")
    live = list(range(1, 1 + len(conversations)))
    torch.testing.assert_close(padded.state.recurrent[:, live], plain.state.recurrent[:, live], atol=1e-5, rtol=1e-4)
    assert torch.equal(padded.state.recurrent[:, 5:8], plain.state.recurrent[:, 5:8])
    owned = [block for slot in live for block in padded.tables[slot]]
    written = plain.kv.k[:, owned].isfinite()
    assert torch.equal(padded.kv.k[:, owned].isfinite(), written)


def test_decode_rows_in_any_order_and_with_gaps_equal_their_solo_runs(model, conversations):
    driver = Driver(model)
    slots = [9, 2, 6, 3, 7]
    for slot, (_, tokens, _) in zip(slots, conversations, strict=False):
        driver.open(slot, len(tokens))
    driver.fill_with_nan()
    rows = list(zip(slots, conversations, strict=False))
    driver.step(prefill=[(slot, tokens[:count]) for slot, (count, tokens, _) in rows])
    for step in range(6):
        decoded, _ = driver.step(
            decode=[(slot, tokens[count + step]) for slot, (count, tokens, _) in rows], use_range=step % 2 == 0
        )
        for row, (slot, (count, _, expected)) in enumerate(rows):
            assert_close(decoded[row], expected[count + step], f"slot {slot}, step {step}")


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_the_block_size_does_not_change_results(model, prompts, conversations, block_size):
    driver = Driver(model, block_size=block_size)
    tokens, expected = prompts[-1]
    count, chat, chat_expected = conversations[3]
    driver.open(1, len(chat))
    driver.open(2, len(tokens))
    driver.fill_with_nan()
    driver.step(prefill=[(1, chat[:count]), (2, tokens[:64])])
    decoded, (rest,) = driver.step(decode=[(1, chat[count])], prefill=[(2, tokens[64:])])
    assert_close(decoded[0], chat_expected[count], "decode row")
    assert_close(rest, expected[64:], "second chunk")


def test_clearing_slots_zeroes_them_and_no_others(model):
    driver = Driver(model, num_slots=3)
    driver.state.recurrent.fill_(2.0)
    driver.state.conv.fill_(2.0)
    driver.state.clear([1, 3])
    for pool in (driver.state.recurrent, driver.state.conv):
        assert (pool[:, [1, 3]] == 0).all()
        assert (pool[:, [0, 2]] == 2).all()
