"""Small engines on the simulated executor, for the scheduler and engine tests."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from bireme.config import FULL_ATTENTION, LINEAR_ATTENTION, EngineConfig, ModelConfig, SchedulerConfig
from bireme.engine import EngineCore
from bireme.sim import SimExecutor, sim_capacity
from bireme.types import Request, RequestOutput, SamplingParams

EOS = 511


def model_config(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = dict(
        model_type="qwen3_5_text",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        layer_types=(LINEAR_ATTENTION,) * 3 + (FULL_ATTENTION,),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rotary_dim=8,
        rope_theta=1e7,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        eos_token_ids=(EOS,),
    )
    return ModelConfig(**(values | changes))


def engine(
    *,
    num_slots: int = 8,
    num_blocks: int = 512,
    block_size: int = 64,
    max_model_len: int = 8192,
    budget: int = 2048,
    max_waiting: int = 4096,
    seed: int = 0,
    **sim: Any,
) -> EngineCore:
    capacity = sim_capacity(
        num_slots=num_slots, num_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len
    )
    config = EngineConfig(
        model_path="none",
        model=model_config(),
        scheduler=SchedulerConfig(
            max_num_seqs=num_slots, max_num_batched_tokens=budget, max_model_len=max_model_len, max_waiting=max_waiting
        ),
        seed=seed,
    )
    return EngineCore(config, SimExecutor(capacity, keep_plans=True, **sim))


def plans(core: EngineCore) -> list:
    assert isinstance(core.executor, SimExecutor)
    return core.executor.plans


def request(request_id: str, num_prompt: int = 3, **params: Any) -> Request:
    return Request(request_id, [1 + i % 500 for i in range(num_prompt)], SamplingParams(**params))


def drain(core: EngineCore, max_steps: int = 20_000) -> dict[str, list[RequestOutput]]:
    """Step until nothing is left; every output by request id. Ends with the proof that nothing leaked."""
    seen: dict[str, list[RequestOutput]] = defaultdict(list)
    for _ in range(max_steps):
        if not core.has_unfinished:
            break
        for output in core.step():
            seen[output.request_id].append(output)
        core.scheduler.check_invariants()
    core.assert_idle()
    return seen


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def terminals(outputs: list[RequestOutput]) -> list[RequestOutput]:
    return [output for output in outputs if output.finish_reason is not None]
