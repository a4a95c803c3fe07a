"""How many state slots and KV blocks fit into a rank's memory, from rank-local byte sizes (no torch).

Sizes per rank of T (docs: "What a rank owns under tensor parallelism"): a slot is, for each linear layer, a recurrent
state of (Hv/T)·Dk·Dv float32 values and a conv state of (2·Kd + Vd)/T channels × (kernel − 1) values of the activation
dtype; a token of KV is, for each full layer, K and V of kv heads × D values of the activation dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bireme.config import CHUNK_ALIGNMENT, CacheCapacity, EngineConfig, ModelConfig, rank_shape
from bireme.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CPU_BUDGET_BYTES = 4 * 2**30
CPU_BUDGET_SHARE = 0.4
CPU_REQUEST_SHARE = 0.9
TOKENS_PER_SLOT = 1024
"""Tokens of KV that every slot should come with: slots beyond that would wait for blocks."""
DEVICE_RESERVE_BYTES = 3 * 2**29
"""Kept free on a device for libraries' workspaces, graphs and the samplers' tables."""


def state_bytes_per_slot(model: ModelConfig, tp_size: int, dtype: str) -> int:
    """Bytes of one state slot on one rank: float32 recurrent state and conv state in ``dtype``."""
    shape = rank_shape(model, tp_size)
    key_dim = shape.linear_num_key_heads * model.linear_key_head_dim
    value_dim = shape.linear_num_value_heads * model.linear_value_head_dim
    recurrent = value_dim * model.linear_key_head_dim * DTYPE_BYTES["float32"]
    conv = (2 * key_dim + value_dim) * (model.linear_conv_kernel_dim - 1) * DTYPE_BYTES[dtype]
    return model.num_linear_layers * (recurrent + conv)


def kv_bytes_per_token(model: ModelConfig, tp_size: int, dtype: str) -> int:
    """Bytes of K and V of one token on one rank, over all full-attention layers."""
    heads = rank_shape(model, tp_size).num_key_value_heads
    return model.num_full_layers * 2 * heads * model.head_dim * DTYPE_BYTES[dtype]


def kv_bytes_per_block(model: ModelConfig, tp_size: int, dtype: str, block_size: int) -> int:
    """Bytes of one KV block on one rank."""
    return kv_bytes_per_token(model, tp_size, dtype) * block_size


def activation_bytes(config: EngineConfig) -> int:
    """An upper estimate of what one step's tensors take on one rank, for the largest step that may be planned.

    Per token: the residual stream and its neighbours (4·H), an MLP's three intermediates, the linear-attention
    projection and output, that layer's float32 q, k, v and their transforms, and one state a chunk of 64. Per row that
    samples: float32 logits and two copies.
    """
    model, limits, num_bytes = config.model, config.scheduler, DTYPE_BYTES[config.dtype]
    shape = rank_shape(model, config.parallel.tp_size)
    keys = shape.linear_num_key_heads * model.linear_key_head_dim
    values = shape.linear_num_value_heads * model.linear_value_head_dim
    narrow = 4 * model.hidden_size + 3 * shape.intermediate_size + 2 * keys + 3 * values
    states = values * model.linear_key_head_dim * DTYPE_BYTES["float32"] // CHUNK_ALIGNMENT
    per_token = narrow * num_bytes + 16 * (keys + values) + states
    per_row = 3 * model.vocab_size * DTYPE_BYTES["float32"]
    return (limits.max_num_batched_tokens + limits.max_num_seqs) * per_token + limits.max_num_seqs * per_row


def check_memory_flag(config: EngineConfig) -> None:
    """Refuse a ``--kv-cache-memory-bytes`` that holds no request, which is known before any weight is read.

    Raises:
        ConfigError: names the flag and the least.
    """
    model, tp_size, asked = config.model, config.parallel.tp_size, config.cache.memory_bytes
    slot_bytes = state_bytes_per_slot(model, tp_size, config.dtype)
    block_bytes = kv_bytes_per_block(model, tp_size, config.dtype, config.cache.block_size)
    least = _least_bytes(slot_bytes, block_bytes)
    if asked is not None and asked < least:
        raise ConfigError(
            f"--kv-cache-memory-bytes is {asked} ({_size(asked)}): a rank needs at least {least} ({_size(least)}), for "
            f"one slot of {slot_bytes} bytes and one block of {block_bytes}, each once more for padding rows"
        )


def _least_bytes(slot_bytes: int, block_bytes: int) -> int:
    return 2 * (slot_bytes + block_bytes)


def plan_capacity(config: EngineConfig, available_bytes: int, weight_bytes: int) -> tuple[CacheCapacity, list[str]]:
    """Divide a rank's memory into slots and blocks.

    The padding rows' slot 0 and block 0 are paid for first. KV then keeps room for one request of the full context, as
    far as that is at most half of the memory; slots take the rest up to ``max_num_seqs``, each with up to
    ``TOKENS_PER_SLOT`` tokens of KV; what is left becomes blocks, no more than all slots at full length could use. The
    context is lowered to what one request can have.

    Args:
        config: model, split, dtype and limits.
        available_bytes: what is free on this rank beside the weights.
        weight_bytes: this rank's weights; reported, not subtracted.

    Returns:
        (capacity, warnings): one warning for each limit that had to be lowered, with the numbers and the flag.

    Raises:
        ConfigError: not even one slot and one block fit.
    """
    model, limits, tp_size = config.model, config.scheduler, config.parallel.tp_size
    block_size = config.cache.block_size
    slot_bytes = state_bytes_per_slot(model, tp_size, config.dtype)
    block_bytes = kv_bytes_per_block(model, tp_size, config.dtype, block_size)
    warnings: list[str] = []

    memory = available_bytes
    if config.cache.memory_bytes is not None:
        memory = config.cache.memory_bytes
        if memory > available_bytes:
            warnings.append(
                f"--kv-cache-memory-bytes is {memory} ({_size(memory)}) but only {_size(available_bytes)} are free on "
                f"a rank beside the weights ({_size(weight_bytes)}): using {_size(available_bytes)}"
            )
            memory = available_bytes
    least = _least_bytes(slot_bytes, block_bytes)
    if memory < least:
        raise ConfigError(
            f"cannot hold a single request: state and KV may use {max(0, memory)} bytes ({_size(max(0, memory))}) on a "
            f"rank beside {_size(weight_bytes)} of weights, and {least} ({_size(least)}) are needed for one slot of "
            f"{slot_bytes} bytes and one block of {block_bytes}, each once more for padding rows "
            "(--kv-cache-memory-bytes, --gpu-memory-utilization, --tensor-parallel-size)"
        )
    memory -= slot_bytes + block_bytes

    model_len = limits.max_model_len or model.max_position_embeddings
    if model_len > model.max_position_embeddings:
        warnings.append(
            f"--max-model-len is {model_len} but the model's max_position_embeddings is "
            f"{model.max_position_embeddings}: serving up to {model.max_position_embeddings} tokens a request"
        )
        model_len = model.max_position_embeddings
    blocks_per_request = -(-model_len // block_size)
    blocks_per_slot = -(-min(model_len, TOKENS_PER_SLOT) // block_size)
    kept_for_kv = max(block_bytes, min(blocks_per_request * block_bytes, memory // 2))
    num_slots = min(
        limits.max_num_seqs,
        _quotient(memory - kept_for_kv, slot_bytes),
        _quotient(memory, slot_bytes + blocks_per_slot * block_bytes),
    )
    num_slots = max(1, num_slots)
    if num_slots < limits.max_num_seqs:
        warnings.append(
            f"--max-num-seqs is {limits.max_num_seqs} but a slot takes {_size(slot_bytes)} and "
            f"{_size(memory)} are left for state and KV: running up to {num_slots} requests at once "
            "(--kv-cache-memory-bytes raises it)"
        )
    num_blocks = min(_quotient(memory - num_slots * slot_bytes, block_bytes), limits.max_num_seqs * blocks_per_request)
    if num_blocks < blocks_per_request:
        source = "--max-model-len is" if limits.max_model_len else "the model's context is"
        warnings.append(
            f"{source} {model_len} tokens but beside {num_slots} slots KV has room for {num_blocks * block_size} at "
            f"{block_bytes // block_size} bytes a token: serving up to {num_blocks * block_size} tokens a request "
            "(--kv-cache-memory-bytes raises it, --max-model-len or --max-num-seqs say what to expect)"
        )
        model_len = num_blocks * block_size
    capacity = CacheCapacity(
        num_slots=num_slots,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=model_len,
        bytes_per_slot=slot_bytes,
        bytes_per_block=block_bytes,
        weight_bytes=weight_bytes,
    )
    return capacity, warnings


def smallest(capacities: Sequence[CacheCapacity]) -> CacheCapacity:
    """What every rank can hold: the least of each count. Byte sizes are those of the most heavily loaded rank.

    Raises:
        ValueError: no capacities, or ranks that disagree on the block size.
    """
    if not capacities or len({capacity.block_size for capacity in capacities}) != 1:
        raise ValueError(f"ranks must report one block size, got {[capacity.block_size for capacity in capacities]}")
    return CacheCapacity(
        num_slots=min(capacity.num_slots for capacity in capacities),
        num_blocks=min(capacity.num_blocks for capacity in capacities),
        block_size=capacities[0].block_size,
        max_model_len=min(capacity.max_model_len for capacity in capacities),
        bytes_per_slot=max(capacity.bytes_per_slot for capacity in capacities),
        bytes_per_block=max(capacity.bytes_per_block for capacity in capacities),
        weight_bytes=max(capacity.weight_bytes for capacity in capacities),
    )


def describe(capacity: CacheCapacity, tp_size: int = 1) -> list[str]:
    """Start-up lines: what a rank holds, with the bytes that the counts come from."""
    where = "" if tp_size == 1 else f" on each of {tp_size} ranks"
    slots = (capacity.num_slots + 1) * capacity.bytes_per_slot
    blocks = (capacity.num_blocks + 1) * capacity.bytes_per_block
    return [
        f"weights: {_size(capacity.weight_bytes)}{where}",
        f"state: {capacity.num_slots} slots × {_size(capacity.bytes_per_slot)} = {_size(slots)}{where} "
        "(1 slot more for padding rows)",
        f"KV: {capacity.num_tokens} tokens × {_size(capacity.bytes_per_block // capacity.block_size)} = "
        f"{_size(blocks)}{where} ({capacity.num_blocks} blocks of {capacity.block_size}, 1 more for padding rows)",
        f"limits: {capacity.num_slots} requests at once, {capacity.max_model_len} tokens a request",
    ]


def available_memory(config: EngineConfig, device_memory: tuple[int, int] | None = None) -> int:
    """Bytes that state and KV may use on this rank; ask when the weights are in.

    On a device: ``gpu_memory_utilization`` of all of it, less what is in use, less ``activation_bytes`` and a reserve;
    ranks that share one GPU (``device`` names it) get equal parts. On the CPU: the least of 4 GiB and
    40 % of the machine's available memory, shared by the ranks; 90 % of it where ``memory_bytes`` asks for an amount.

    Args:
        config: the engine's configuration.
        device_memory: (free, total) bytes of this rank's device; None on the CPU.

    Raises:
        ConfigError: memory cannot be found out on this machine and ``memory_bytes`` is not given.
    """
    if device_memory is not None:
        free, total = device_memory
        num_sharing = config.parallel.tp_size if ":" in config.device else 1
        left = (int(total * config.cache.gpu_memory_utilization) - (total - free)) // num_sharing
        return left - activation_bytes(config) - DEVICE_RESERVE_BYTES
    asked = config.cache.memory_bytes
    machine = cpu_available_bytes()
    if machine is None:
        if asked is None:
            raise ConfigError("cannot find out how much memory is free: give it with --kv-cache-memory-bytes")
        return asked
    if asked is None:
        shared = min(CPU_BUDGET_BYTES, int(machine * CPU_BUDGET_SHARE))
    else:
        shared = int(machine * CPU_REQUEST_SHARE)
    return shared // config.parallel.tp_size


def cpu_available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Memory that can still be taken without swapping: the kernel's estimate, within the container's limit if there is
    one. None where the system does not say."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if "MemAvailable" not in fields:
        return None
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        detail = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return available
    # File pages count as used but are given up on demand; the pages of the weight files just read are among them.
    return max(0, min(available, limit - used + int(detail.get("inactive_file", 0))))


def _quotient(memory: int, size: int) -> int:
    return max(0, memory) // max(1, size)


def _size(num_bytes: int) -> str:
    """A byte count to read: 1.5 GiB, 20.0 MiB, 12.3 KiB, 80 B."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} B"
