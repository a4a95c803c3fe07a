"""Gated DeltaNet (arXiv 2412.06464): short convolution, gated delta rule, gated norm, with state in slots.

Per token and value head, with S [Dk, Dv] the recurrent state, k and q of unit length (q scaled by Dk^-0.5):
S ← exp(g)·S; δ = β·(v − Sᵀk); S ← S + k·δᵀ; o = Sᵀq, where β = sigmoid(b) and g = −exp(A_log)·softplus(a + dt_bias).
Value head h reads key head h // (Hv / Hk). State and everything between the convolution and the gate are float32.

Both entry points take rows q|k|v|z|b|a of the fused input projection and return what the output projection reads.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from bireme.kernels.reference.norm import cast, rms_norm, scalar

CHUNK = 64
"""Tokens of the chunked form, counted from the start of a row's chunk."""

L2_EPS = 1e-6
"""Added to the sum of squares when q and k are normalised (the architecture's constant, not the norm's eps)."""


def gdn_decode(
    mixed: Tensor,
    conv_weight: Tensor,
    dt_bias: Tensor,
    neg_exp_a: Tensor,
    norm_weight: Tensor,
    recurrent_state: Tensor,
    conv_state: Tensor,
    slots: Tensor,
    slot_range: tuple[int, int] | None,
    in_order: bool,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """One token a row: convolution update, delta step, gated norm; both states are advanced in place.

    Args:
        mixed: [R, 2·Kd + 2·Vd + 2·Hv], rows q|k|v|z|b|a.
        conv_weight: [kernel, 2·Kd + Vd] float32, oldest tap first.
        dt_bias, neg_exp_a: [Hv] float32; the latter is −exp(A_log).
        norm_weight: [Dv] float32, plain (no + 1).
        recurrent_state: [S, Hv, Dk, Dv] float32.
        conv_state: [S, kernel − 1, 2·Kd + Vd] in mixed's dtype, oldest input first.
        slots: [R] int64; padding rows name slot 0.
        slot_range: (lowest, highest + 1) of ``slots``, when reading every slot in between beats gathering; or None. The
            slots in between that are no rows keep their values.
        in_order: ``slots`` is exactly ``slot_range``, ascending.
        eps: of the gated norm.
        out: [R, Vd] in mixed's dtype, where the result goes; None: into new memory.

    Returns:
        [R, Vd] in mixed's dtype.
    """
    num_rows = mixed.shape[0]
    _, num_v_heads, key_dim, value_dim = recurrent_state.shape
    channels = conv_weight.shape[1]
    keys_width = channels - num_v_heads * value_dim
    if slot_range is None:
        state, history = recurrent_state.index_select(0, slots), conv_state.index_select(0, slots)
    else:
        first, end = slot_range
        state = recurrent_state[first:end]
        history = conv_state[first:end] if in_order else conv_state.index_select(0, slots)
    # Where the rows lie in ``state``; None: row i is entry i.
    places = None if slot_range is None or in_order else slots - slot_range[0]

    inputs, z, b, a = mixed.split_with_sizes((channels, num_v_heads * value_dim, num_v_heads, num_v_heads), -1)
    window = torch.cat((history, inputs.unsqueeze(1)), 1)
    if slot_range is not None and in_order:
        history.copy_(window[:, 1:])
    else:
        conv_state.index_copy_(0, slots, window[:, 1:])
    qkv = cast(cast(F.silu(torch.mul(window, conv_weight).sum(1)), mixed.dtype), torch.float32)
    qk, value = qkv.split_with_sizes((keys_width, channels - keys_width), -1)
    value = value.view(num_rows, num_v_heads, value_dim)
    beta, log_decay = _gates(b, a, dt_bias, neg_exp_a)
    decay = log_decay.exp_().view(num_rows, num_v_heads, 1, 1)

    # Each value head's unit (q, k) pair side by side, so that one product reads the state for both.
    qk = qk.view(num_rows, 2, -1, 1, key_dim)
    num_k_heads = qk.shape[2]
    group = num_v_heads // num_k_heads
    pairs = qkv.new_empty(num_rows, num_k_heads, group, 2, key_dim)
    torch.mul(qk.expand(-1, -1, -1, group, -1), _inverse_length(qk), out=pairs.permute(0, 3, 1, 2, 4))
    pairs = pairs.view(num_rows, num_v_heads, 2, key_dim)
    q, k = pairs.select(2, 0), pairs.select(2, 1)
    overlap = torch.mul(q, k).sum(-1, keepdim=True)

    if places is not None:
        pairs = _spread(pairs, places, len(state), 0.0)
        k = pairs.select(2, 1)
    reads = torch.bmm(pairs.view(-1, 2, key_dim), state.view(-1, key_dim, value_dim))
    reads = reads.view(-1, num_v_heads, 2, value_dim)
    if places is not None:
        reads = reads.index_select(0, places)
    reads.mul_(decay)
    delta = torch.sub(value, reads.select(2, 1)).mul_(beta.unsqueeze(-1))
    # Sᵀq after the update, from the reads before it: exp(g)·S_oldᵀq + (k·q)·δ.
    read = torch.addcmul(reads.select(2, 0), overlap, delta)
    if places is not None:
        decay, delta = _spread(decay, places, len(state), 1.0), _spread(delta, places, len(state), 0.0)
    state.mul_(decay).addcmul_(k.unsqueeze(-1), delta.unsqueeze(-2))
    if slot_range is None:
        recurrent_state.index_copy_(0, slots, state)
    return _gated_norm(read, z, norm_weight, eps * key_dim, out)


def gdn_prefill(
    mixed: Tensor,
    conv_weight: Tensor,
    dt_bias: Tensor,
    neg_exp_a: Tensor,
    norm_weight: Tensor,
    recurrent_state: Tensor,
    conv_state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    row_starts: Tensor,
    chunks: Tensor,
    seq_lens: list[int],
    starts: list[int],
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """Packed chunks of prompts, in the chunked (WY) form; states are resumed from their slots and written back.

    Args:
        mixed: [T, 2·Kd + 2·Vd + 2·Hv], the rows' chunks one after another.
        slots: [P] int64, distinct.
        cu_seqlens, row_starts: [P + 1] and [P] int32: ``seq_lens`` (as offsets) and ``starts``, for kernels that read
            them on the device. There a row may be without tokens; it then leaves its slot as it is.
        chunks: [C, 4] int32, the rows cut into pieces of 64 tokens, likewise for the device: (row, first packed token,
            number of tokens (0: no piece), tokens of the row before it).
        seq_lens: tokens of each row's chunk (≥ 1).
        starts: each row's tokens before its chunk; with 0 the row starts from zero state and its slot is not read.
        (the others: as in ``gdn_decode``)

    Returns:
        [T, Vd] in mixed's dtype.
    """
    _, num_v_heads, key_dim, value_dim = recurrent_state.shape
    channels = conv_weight.shape[1]
    keys_width = channels - num_v_heads * value_dim
    layout = _chunk_layout(
        tuple(seq_lens), tuple(start > 0 for start in starts), conv_weight.shape[0] - 1, mixed.device
    )
    inputs, z, b, a = mixed.split_with_sizes((channels, num_v_heads * value_dim, num_v_heads, num_v_heads), -1)
    qkv = _convolve_chunks(inputs, conv_weight, conv_state, slots, layout)

    qk = qkv[:, :keys_width].view(len(qkv), 2, -1, 1, key_dim)
    num_k_heads = qk.shape[2]
    qk.mul_(_inverse_length(qk))
    beta, log_decay = _gates(b, a, dt_bias, neg_exp_a)

    def chunked(packed: Tensor, heads: int) -> Tensor:
        """[T, heads · n] → [chunks, heads, 64, n]; positions past a row's end are zeros, which change no state."""
        padded = packed.new_zeros(layout.num_chunks * CHUNK, packed.shape[1])
        return (
            padded.index_copy_(0, layout.places, packed)
            .view(-1, CHUNK, heads, packed.shape[1] // heads)
            .transpose(1, 2)
        )

    q, k = chunked(qkv[:, :keys_width], 2 * num_k_heads).contiguous().split(num_k_heads, dim=1)
    v = chunked(qkv[:, keys_width:], num_v_heads)
    beta = chunked(beta, num_v_heads)
    total = chunked(log_decay, num_v_heads).squeeze(-1).cumsum(-1)  # log decay since the chunk's start
    group = num_v_heads // num_k_heads

    def per_value_head(x: Tensor) -> Tensor:
        """[chunks, Hk, …] → [chunks, Hk, 1, …], to meet [chunks, Hk, g, …]."""
        return x.unsqueeze(2)

    def by_key_head(x: Tensor) -> Tensor:
        return x.unflatten(1, (num_k_heads, group))

    # decay[i, j] = exp(total_i − total_j) for j ≤ i: how much of token j's write is left at token i.
    decay = total.unsqueeze(-1) - total.unsqueeze(-2)
    decay = decay.masked_fill_(layout.future, float("-inf")).exp_()
    scores = torch.matmul(q, k.transpose(-1, -2))
    overlaps = torch.matmul(k, k.transpose(-1, -2))
    attention = torch.mul(by_key_head(decay), per_value_head(scores)).flatten(1, 2)
    system = torch.mul(by_key_head(decay), per_value_head(overlaps)).flatten(1, 2).mul_(beta)
    grown = total.exp().unsqueeze(-1)
    left = (total[..., -1:] - total).exp_().unsqueeze(-1)
    chunk_decay = grown[..., -1:, :]
    k_in = torch.mul(per_value_head(k), by_key_head(grown * beta)).flatten(1, 2)
    q_in = torch.mul(per_value_head(q), by_key_head(grown)).flatten(1, 2)
    k_out = torch.mul(per_value_head(k), by_key_head(left)).flatten(1, 2).transpose(-1, -2)

    # (I + A)⁻¹ [β·v | β·exp(total)·k]: each token's write as if the chunk began with S = 0, and its read of S.
    solved = torch.linalg.solve_triangular(system, torch.cat((v * beta, k_in), -1), upper=False, unitriangular=True)
    writes, state_reads = solved.split_with_sizes((value_dim, key_dim), -1)

    state = recurrent_state.new_zeros(len(seq_lens), num_v_heads, key_dim, value_dim)
    if layout.resumed is not None:
        state.index_copy_(0, layout.resumed_ranks, recurrent_state.index_select(0, slots[layout.resumed]))
    read = torch.empty_like(writes)
    first = 0
    for num_active in layout.active:
        these = slice(first, first + num_active)
        current = state[:num_active]
        delta = writes[these] - torch.matmul(state_reads[these], current)
        read[these] = torch.matmul(q_in[these], current).add_(torch.matmul(attention[these], delta))
        current.mul_(chunk_decay[these]).add_(torch.matmul(k_out[these], delta))
        first += num_active
    recurrent_state.index_copy_(0, slots[layout.order], state)

    read = read.transpose(1, 2).reshape(-1, num_v_heads, value_dim).index_select(0, layout.places)
    return _gated_norm(read, z, norm_weight, eps * key_dim, out)


def _inverse_length(qk: Tensor) -> Tensor:
    """``1 / sqrt(sum(x²) + 1e-6)`` over the last dimension (kept)."""
    length = torch.linalg.vector_norm(qk, 2, -1, True)
    return torch.addcmul(scalar(L2_EPS, qk.device), length, length).rsqrt_()


def _gates(b: Tensor, a: Tensor, dt_bias: Tensor, neg_exp_a: Tensor) -> tuple[Tensor, Tensor]:
    """β and g, both [N, Hv] float32."""
    b, a = cast(b, torch.float32), cast(a, torch.float32)
    return torch.sigmoid(b), F.softplus(torch.add(a, dt_bias)).mul_(neg_exp_a)


def _spread(rows: Tensor, places: Tensor, count: int, fill: float) -> Tensor:
    """[R, …] → [count, …] with row i at ``places[i]`` and ``fill`` elsewhere."""
    return rows.new_full((count, *rows.shape[1:]), fill).index_copy_(0, places, rows)


def _gated_norm(read: Tensor, z: Tensor, weight: Tensor, eps: float, out: Tensor | None) -> Tensor:
    """RMSNorm(read)·weight, rounded to z's dtype, times SiLU(z): [N, Hv, Dv] and [N, Hv·Dv] → [N, Hv·Dv], in ``out``.

    The callers leave out q's factor Dk^-0.5, which scales ``read`` as a whole, and pass eps · Dk: the quotient is the
    same.
    """
    normed = cast(rms_norm(read, weight, eps).view(z.shape), z.dtype)
    gated = F.silu(cast(z, torch.float32)).mul_(normed)
    return cast(gated, z.dtype) if out is None else out.copy_(gated)


def _convolve_chunks(inputs: Tensor, weight: Tensor, conv_state: Tensor, slots: Tensor, layout: _ChunkLayout) -> Tensor:
    """Causal depthwise convolution and SiLU of packed chunks behind their history; advances ``conv_state``.

    Args:
        inputs: [T, C]; weight: [kernel, C] float32; conv_state: [S, kernel − 1, C].

    Returns:
        [T, C] float32, rounded to the inputs' dtype.
    """
    taps, channels = weight.shape
    extended = torch.zeros(len(inputs) + len(slots) * (taps - 1), channels, dtype=torch.float32, device=inputs.device)
    extended.index_copy_(0, layout.inputs_at, inputs.float())
    if layout.resumed is not None:
        history = conv_state.index_select(0, slots[layout.resumed])
        extended.index_copy_(0, layout.history_at, history.flatten(0, 1).float())
    conv_state.index_copy_(
        0, slots, extended.index_select(0, layout.tails_at).view(len(slots), taps - 1, channels).to(conv_state.dtype)
    )
    width = len(extended) - taps + 1
    convolved = extended[:width] * weight[0]
    for tap in range(1, taps):
        convolved.addcmul_(extended[tap : tap + width], weight[tap])
    return F.silu(convolved.index_select(0, layout.outputs_at)).to(inputs.dtype).float()


class _ChunkLayout:
    """Where packed tokens go among padded chunks of 64, and among rows extended by their convolution history.

    Chunks are ordered by their index within the row, then by row, rows with more chunks first: the chunks that one scan
    step handles, and the states it handles, are then slices.

    Attributes:
        places: [T] int64, each packed token's place among the chunks' positions.
        order: [P] int64, the rows by descending number of chunks; a row's place here is its rank.
        active: for each chunk index, how many rows have such a chunk.
        num_chunks: all chunks.
        resumed: [Q] int64, rows that continue from their slot (None: no such row); ``resumed_ranks`` their ranks.
        inputs_at, outputs_at: [T] int64, a token's place in the extended rows, and that of its convolution output.
        history_at: [Q · history] int64, where the resumed rows' histories lie in the extended rows.
        tails_at: [P · history] int64, where each row's next history lies.
        future: [64, 64] bool, True above the diagonal.
    """

    __slots__ = (
        "active",
        "future",
        "history_at",
        "inputs_at",
        "num_chunks",
        "order",
        "outputs_at",
        "places",
        "resumed",
        "resumed_ranks",
        "tails_at",
    )

    def __init__(
        self, seq_lens: tuple[int, ...], resumed: tuple[bool, ...], history: int, device: torch.device
    ) -> None:
        lengths = torch.tensor(seq_lens)
        rows = torch.arange(len(seq_lens))
        offsets = lengths.cumsum(0) - lengths
        chunks = (lengths + CHUNK - 1) // CHUNK
        order = torch.argsort(chunks, descending=True, stable=True)
        rank = torch.empty_like(order)
        rank[order] = rows
        self.active: list[int] = [int((chunks > index).sum()) for index in range(int(chunks.max()))]
        self.num_chunks = sum(self.active)
        chunk_starts = torch.tensor([0, *self.active]).cumsum(0)

        row_of_token = rows.repeat_interleave(lengths)
        token = torch.arange(int(lengths.sum()))
        at = token - offsets[row_of_token]
        places = (chunk_starts[at // CHUNK] + rank[row_of_token]) * CHUNK + at % CHUNK
        outputs_at = token + row_of_token * history
        steps = torch.arange(history)
        continuing = torch.tensor(resumed)
        self.places = places.to(device)
        self.order = order.to(device)
        self.resumed: Tensor | None = rows[continuing].to(device) if any(resumed) else None
        self.resumed_ranks = rank[continuing].to(device)
        self.inputs_at = (outputs_at + history).to(device)
        self.outputs_at = outputs_at.to(device)
        first = offsets + rows * history
        self.history_at = (first[continuing, None] + steps).flatten().to(device)
        self.tails_at = ((first + lengths)[:, None] + steps).flatten().to(device)
        self.future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=device).triu_(1)


@functools.lru_cache(maxsize=4)
def _chunk_layout(
    seq_lens: tuple[int, ...], resumed: tuple[bool, ...], history: int, device: torch.device
) -> _ChunkLayout:
    """Every linear-attention layer of a step asks for the same layout."""
    return _ChunkLayout(seq_lens, resumed, history, device)
