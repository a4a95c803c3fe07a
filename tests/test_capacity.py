"""How memory is divided into slots and blocks: formulas against published sizes, limits, refusals."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_helpers import model_config

from bireme.cache.capacity import (
    DEVICE_RESERVE_BYTES,
    activation_bytes,
    available_memory,
    cpu_available_bytes,
    describe,
    kv_bytes_per_block,
    kv_bytes_per_token,
    plan_capacity,
    smallest,
    state_bytes_per_slot,
)
from bireme.config import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from bireme.errors import ConfigError

GIB = 2**30


def geometry(layers: int, q: int, kv: int, hidden: int, value_heads: int) -> ModelConfig:
    return model_config(
        layer_types=((LINEAR_ATTENTION,) * 3 + (FULL_ATTENTION,)) * (layers // 4),
        hidden_size=hidden,
        num_attention_heads=q,
        num_key_value_heads=kv,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=262144,
    )


B27 = geometry(64, 24, 4, 5120, 48)
B4 = geometry(32, 16, 4, 2560, 32)


@pytest.mark.parametrize(
    ("model", "tp_size", "dtype", "slot", "token"),
    [
        # 48 linear layers × (48 heads × 128 × 128 × 4 bytes, and 10240 channels × 3 × 2 bytes)
        (B27, 1, "bfloat16", 150_994_944 + 2_949_120, 65_536),
        (B27, 2, "bfloat16", 75_497_472 + 1_474_560, 32_768),
        (B27, 4, "bfloat16", 37_748_736 + 737_280, 16_384),
        # Two ranks share each kv head: a token no longer shrinks.
        (B27, 8, "bfloat16", 18_874_368 + 368_640, 16_384),
        # float32 doubles conv state and KV, not the recurrent state, which is float32 anyway.
        (B27, 1, "float32", 150_994_944 + 5_898_240, 131_072),
        (B4, 1, "bfloat16", 24 * 32 * 128 * 128 * 4 + 24 * 8192 * 3 * 2, 8 * 2 * 4 * 256 * 2),
    ],
)
def test_bytes_per_slot_and_token_follow_the_formulas(model, tp_size, dtype, slot, token):
    assert state_bytes_per_slot(model, tp_size, dtype) == slot
    assert kv_bytes_per_token(model, tp_size, dtype) == token
    assert kv_bytes_per_block(model, tp_size, dtype, 64) == 64 * token


def config(
    model: ModelConfig = B27, *, tp_size: int = 1, memory: int | None = None, dtype: str = "bfloat16", **limits
) -> EngineConfig:
    return EngineConfig(
        model_path="none",
        model=model,
        parallel=ParallelConfig(tp_size=tp_size),
        cache=CacheConfig(memory_bytes=memory),
        scheduler=SchedulerConfig(**limits),
        dtype=dtype,
    )


def held_bytes(capacity) -> int:
    """What the pools take, padding slot and block included."""
    slots, blocks = capacity.num_slots + 1, capacity.num_blocks + 1
    return slots * capacity.bytes_per_slot + blocks * capacity.bytes_per_block


def test_with_room_for_everything_all_limits_hold_and_blocks_are_capped():
    capacity, warnings = plan_capacity(config(max_num_seqs=16, max_model_len=32768), 80 * GIB, 54 * GIB)
    assert warnings == []
    assert (capacity.num_slots, capacity.num_blocks, capacity.max_model_len) == (16, 16 * 512, 32768)
    assert capacity.weight_bytes == 54 * GIB
    assert held_bytes(capacity) < 80 * GIB


def test_27b_at_tp2_holds_16_slots_and_32k_tokens_beside_its_weights_in_48_gb():
    asked = config(tp_size=2, max_num_seqs=16, max_model_len=32768)
    free = available_memory(asked, device_memory=(48 * 10**9 - 27_500_000_000, 48 * 10**9))
    assert free == int(48 * 10**9 * 0.9) - 27_500_000_000 - activation_bytes(asked) - DEVICE_RESERVE_BYTES
    capacity, warnings = plan_capacity(asked, free, 27_500_000_000)
    assert warnings == []
    assert capacity.num_slots == 16 and capacity.num_tokens >= 32768 and capacity.max_model_len == 32768


def test_the_estimate_of_activations_grows_with_the_step_and_shrinks_with_the_split():
    small, large = (activation_bytes(config(max_num_batched_tokens=tokens)) for tokens in (1024, 8192))
    assert small < large < 9 * small
    assert activation_bytes(config(tp_size=2)) < activation_bytes(config())


def test_slots_that_do_not_fit_are_lowered_with_the_numbers_and_the_flag():
    capacity, warnings = plan_capacity(config(max_num_seqs=256, max_model_len=4096), 10 * GIB, 0)
    (warning,) = warnings
    assert warning.startswith("--max-num-seqs is 256 but a slot takes 146.8 MiB")
    assert f"up to {capacity.num_slots} requests" in warning and "--kv-cache-memory-bytes" in warning
    assert 1 < capacity.num_slots < 256 and capacity.max_model_len == 4096
    assert capacity.num_tokens >= 1024 * capacity.num_slots


@pytest.mark.parametrize("asked", [None, 200_000])
def test_a_context_that_does_not_fit_is_lowered_with_the_numbers_and_the_flag(asked):
    capacity, warnings = plan_capacity(config(max_num_seqs=4, max_model_len=asked), 6 * GIB, 0)
    (warning,) = warnings
    assert str(asked or 262144) in warning and "--max-model-len" in warning and "65536 bytes a token" in warning
    assert f"up to {capacity.max_model_len} tokens" in warning
    assert capacity.max_model_len == capacity.num_tokens < 200_000
    assert capacity.num_slots == 4


def test_memory_asked_for_beyond_what_is_free_is_lowered_with_the_numbers_and_the_flag():
    capacity, warnings = plan_capacity(config(memory=50 * GIB, max_num_seqs=2, max_model_len=1024), 2 * GIB, 3 * GIB)
    assert "--kv-cache-memory-bytes is 53687091200 (50.0 GiB) but only 2.0 GiB are free" in warnings[0]
    assert held_bytes(capacity) <= 2 * GIB


def test_memory_asked_for_is_all_that_is_used():
    capacity, _ = plan_capacity(config(memory=2 * GIB, max_num_seqs=64), 80 * GIB, 0)
    assert held_bytes(capacity) <= 2 * GIB


def test_a_context_beyond_the_models_own_is_lowered():
    capacity, warnings = plan_capacity(config(max_num_seqs=1, max_model_len=300_000), 80 * GIB, 0)
    assert capacity.max_model_len == 262144
    assert "--max-model-len is 300000" in warnings[0] and "262144" in warnings[0]


@pytest.mark.parametrize("available", [-5, 0, 2 * (153_944_064 + 64 * 65_536) - 1])
def test_memory_for_less_than_one_slot_and_one_block_is_refused_with_the_numbers(available):
    with pytest.raises(ConfigError, match=r"316276736 .* one slot of 153944064 bytes .* block of 4194304.*--kv-cache"):
        plan_capacity(config(), available, 54 * GIB)


def test_memory_for_exactly_one_slot_and_one_block_serves_one_short_request():
    capacity, warnings = plan_capacity(config(max_num_seqs=8), 2 * (153_944_064 + 64 * 65_536), 0)
    assert (capacity.num_slots, capacity.num_blocks, capacity.max_model_len) == (1, 1, 64)
    assert len(warnings) == 2


@given(
    st.integers(0, 60 * GIB),
    st.integers(1, 300),
    st.one_of(st.none(), st.integers(1, 262144)),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([B27, B4]),
)
def test_a_plan_never_takes_more_than_there_is_nor_more_than_was_asked(available, max_num_seqs, max_len, tp, model):
    cfg = config(model, tp_size=tp, max_num_seqs=max_num_seqs, max_model_len=max_len)
    try:
        capacity, warnings = plan_capacity(cfg, available, 0)
    except ConfigError:
        assert available < 2 * (
            state_bytes_per_slot(model, tp, "bfloat16") + kv_bytes_per_block(model, tp, "bfloat16", 64)
        )
        return
    assert held_bytes(capacity) <= available
    assert 1 <= capacity.num_slots <= max_num_seqs
    asked = max_len or 262144
    assert 1 <= capacity.max_model_len <= min(asked, capacity.num_tokens)
    assert capacity.num_blocks <= max_num_seqs * -(-asked // 64)
    assert len(warnings) == (capacity.num_slots < max_num_seqs) + (capacity.max_model_len < asked)


def test_the_smallest_rank_decides_for_all():
    one, _ = plan_capacity(config(max_num_seqs=64, max_model_len=8192), 20 * GIB, 5)
    two, _ = plan_capacity(config(max_num_seqs=64, max_model_len=8192), 8 * GIB, 7)
    assert smallest([one, two]) == smallest([two, one]) == msgspec.structs.replace(two, weight_bytes=7)
    mixed = smallest([msgspec.structs.replace(one, num_slots=3), two])
    assert (mixed.num_slots, mixed.num_blocks) == (3, two.num_blocks)
    assert smallest([one]) == one


def test_ranks_that_disagree_on_the_block_size_are_an_error():
    one, _ = plan_capacity(config(max_num_seqs=1), 20 * GIB, 0)
    for capacities in ([], [one, msgspec.structs.replace(one, block_size=16)]):
        with pytest.raises(ValueError, match="one block size"):
            smallest(capacities)


def test_the_start_up_lines_give_bytes_and_counts_per_rank():
    capacity, _ = plan_capacity(config(tp_size=2, max_num_seqs=16, max_model_len=32768), 40 * GIB, 27 * GIB)
    text = "\n".join(describe(capacity, tp_size=2))
    for part in (
        "27.0 GiB on each of 2 ranks",
        "16 slots × 73.4 MiB",
        "524288 tokens × 32.0 KiB",
        "32768 tokens a request",
    ):
        assert part in text


def machine(tmp_path, available_kib: int, limit: str | None = None, used: int = 0, inactive: int = 0):
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    cgroup.mkdir()
    (proc / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {available_kib} kB\nHugePages_Total: 0\n")
    if limit is not None:
        (cgroup / "memory.max").write_text(limit + "\n")
        (cgroup / "memory.current").write_text(f"{used}\n")
        (cgroup / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")
    return proc, cgroup


@pytest.mark.parametrize(
    ("limit", "used", "inactive", "expected"),
    [
        (None, 0, 0, 1_024_000),
        ("max", 500, 0, 1_024_000),
        ("600000", 100_000, 0, 500_000),
        ("600000", 100_000, 60_000, 560_000),
        ("9000000000", 0, 0, 1_024_000),
        ("600000", 700_000, 0, 0),
    ],
)
def test_free_memory_is_the_kernels_estimate_within_the_containers_limit(tmp_path, limit, used, inactive, expected):
    assert cpu_available_bytes(*machine(tmp_path, 1000, limit, used, inactive)) == expected


def test_an_unknown_machine_has_no_estimate(tmp_path):
    assert cpu_available_bytes(tmp_path, tmp_path) is None


@pytest.mark.parametrize(
    ("free", "tp_size", "asked", "expected"),
    [
        (100 * GIB, 1, None, 4 * GIB),
        (100 * GIB, 2, None, 2 * GIB),
        (5 * GIB, 1, None, 2 * GIB),
        (100 * GIB, 2, GIB, 45 * GIB),
    ],
)
def test_the_cpus_share_is_a_part_of_what_is_free_divided_by_the_ranks(monkeypatch, free, tp_size, asked, expected):
    monkeypatch.setattr("bireme.cache.capacity.cpu_available_bytes", lambda: free)
    assert available_memory(config(tp_size=tp_size, memory=asked)) == expected


def test_where_memory_cannot_be_found_out_it_must_be_given(monkeypatch):
    monkeypatch.setattr("bireme.cache.capacity.cpu_available_bytes", lambda: None)
    assert available_memory(config(memory=GIB)) == GIB
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes"):
        available_memory(config())
