"""Training-time forward pass of a Qwen3.5 text model over packed documents.

The parameters are those of transformers' ``Qwen3_5ForCausalLM``; only the way they are applied differs: one row of T
tokens holds many documents (see ``corpus``), matrix products run in ``dtype`` while weights, residual stream and norms
stay in float32, and the pieces between kernels are compiled. On a GPU the gated delta rule is flash-linear-attention's
and attention is PyTorch's variable-length flash attention; on a CPU both have plain references, for tests.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from corpus import CHUNK, Batch
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

EPS = 1e-6


class MultiTokenPredictor(nn.Module):
    """Predicts token t + 2 from the model's final hidden state at t and the embedding of token t + 1.

    One full-attention block after a projection of the two normalised inputs; embedding and head are the model's.
    """

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        full = config.layer_types.index("full_attention")
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, full)])
        self.norm = Qwen3_5RMSNorm(hidden, EPS)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(hidden, EPS)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(hidden, EPS)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)


@dataclass(slots=True)
class Row:
    """A packed batch on the device; shapes as in ``corpus.Batch``, ``cos`` and ``sin`` [T, 1, rotary dims]."""

    tokens: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    cu_seqlens_long: Tensor
    chunks: Tensor
    loss_at: Tensor
    loss_weight: Tensor
    cos: Tensor
    sin: Tensor
    longest: int


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """Zero-centred RMS norm in float32."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * (1.0 + weight)


def _product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return F.linear(x.to(dtype), weight.to(dtype))


def _mlp(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, dtype: torch.dtype) -> Tensor:
    h = rms(x, norm).to(dtype)
    inner = F.silu(_product(h, gate, dtype).float()) * _product(h, up, dtype).float()
    return x + _product(inner, down, dtype).float()


def linear_in(
    x: Tensor, positions: Tensor, norm: Tensor, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, conv: Tensor,
    A_log: Tensor, dt_bias: Tensor, key_heads: int, head: int, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k [1, T, Hk, D], v [1, T, Hv, D], log decay and beta float32 [1, T, Hv], output gate z [T, Hv, D]."""
    length = x.shape[0]
    h = rms(x, norm).to(dtype)
    mixed = _product(h, qkv, dtype).float()
    width = conv.shape[-1]
    y = mixed * conv[:, 0, width - 1]
    for back in range(1, width):
        earlier = F.pad(mixed[:-back], (0, 0, back, 0))
        y = y + torch.where(positions[:, None] >= back, earlier, 0.0) * conv[:, 0, width - 1 - back]
    y = F.silu(y)
    keys = key_heads * head
    q, k, v = (part.reshape(length, -1, head) for part in y.split([keys, keys, y.shape[1] - 2 * keys], dim=1))
    q = q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + EPS)
    k = k * torch.rsqrt(k.pow(2).sum(-1, keepdim=True) + EPS)
    beta = _product(h, b, dtype).float().sigmoid()
    decay = -A_log.exp() * F.softplus(_product(h, a, dtype).float() + dt_bias)
    gate = _product(h, z, dtype).reshape(length, -1, head)
    return q.to(dtype)[None], k.to(dtype)[None], v.to(dtype)[None], decay[None], beta[None], gate


def linear_out(
    x: Tensor, o: Tensor, z: Tensor, head_norm: Tensor, out: Tensor, norm: Tensor, gate: Tensor, up: Tensor,
    down: Tensor, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Gated norm (plain weight), output projection, residual, MLP; x float32 [T, H], o [1, T, Hv, D]."""
    o = o[0].float()
    o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + EPS) * head_norm * F.silu(z.float())
    x = x + _product(o.flatten(1), out, dtype).float()
    return _mlp(x, norm, gate, up, down, dtype)


def attention_in(
    x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor, q: Tensor, k: Tensor, v: Tensor, q_norm: Tensor, k_norm: Tensor,
    head: int, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k, v [T, Hq, D] (keys and values repeated for their query heads) and the output gate [T, Hq * D]."""
    length = x.shape[0]
    h = rms(x, norm).to(dtype)
    query, gate = _product(h, q, dtype).reshape(length, -1, 2 * head).chunk(2, dim=-1)
    key, value = (_product(h, w, dtype).reshape(length, -1, head) for w in (k, v))
    groups = query.shape[1] // key.shape[1]
    query, key = _rotate(rms(query, q_norm), cos, sin), _rotate(rms(key, k_norm), cos, sin)
    key, value = (t.to(dtype).repeat_interleave(groups, dim=1) for t in (key, value))
    return query.to(dtype), key, value, gate.reshape(length, -1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-high, low], dim=-1) * sin, kept], dim=-1)


def attention_out(
    x: Tensor, o: Tensor, gate: Tensor, out: Tensor, norm: Tensor, w_gate: Tensor, up: Tensor, down: Tensor,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Output gate, projection, residual, MLP; o [T, Hq, D]."""
    x = x + _product(o.flatten(1).float() * gate.float().sigmoid(), out, dtype).float()
    return _mlp(x, norm, w_gate, up, down, dtype)


def predictor_in(
    hidden: Tensor, following: Tensor, norm_hidden: Tensor, norm_embedding: Tensor, fc: Tensor, dtype: torch.dtype
) -> Tensor:
    """The predictor's block input [T, H] from final hidden states and embeddings of the following tokens."""
    both = torch.cat([rms(following, norm_embedding), rms(hidden, norm_hidden)], dim=-1)
    return _product(both, fc, dtype).float()


def head_loss(
    x: Tensor, norm: Tensor, embedding: Tensor, at: Tensor, targets: Tensor, weight: Tensor, dtype: torch.dtype
) -> Tensor:
    """Weighted mean cross-entropy at positions ``at`` [L] of hidden states x [T, H]."""
    logits = _product(rms(x[at], norm), embedding, dtype).float()
    losses = torch.logsumexp(logits, -1) - logits.gather(1, targets[:, None])[:, 0]
    return (losses * weight).sum() / weight.sum()


def reference_delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, row: Row) -> Tensor:
    """The gated delta rule token by token, in float32: the definition, for tests on a CPU."""
    groups = v.shape[2] // q.shape[2]
    q, k = (t[0].float().repeat_interleave(groups, dim=1) for t in (q, k))
    v, decay, beta = v[0].float(), decay[0].float(), beta[0].float()
    state = torch.zeros(v.shape[1], q.shape[-1], v.shape[-1], device=v.device)
    starts = set(row.cu_seqlens.tolist())
    out = []
    for t in range(v.shape[0]):
        if t in starts:
            state = torch.zeros_like(state)
        state = state * decay[t].exp()[:, None, None]
        delta = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * delta[:, None, :]
        out.append(torch.einsum("hkv,hk->hv", state, q[t]) * q.shape[-1] ** -0.5)
    return torch.stack(out)[None]


def reference_attention(q: Tensor, k: Tensor, v: Tensor, row: Row) -> Tensor:
    """Causal attention inside each document, with a full mask: for tests on a CPU."""
    document = torch.repeat_interleave(torch.arange(len(row.cu_seqlens) - 1), row.cu_seqlens.diff().cpu())
    mask = (document[:, None] == document[None, :]).tril().to(q.device)
    out = F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in (q, k, v)), attn_mask=mask)
    return out[0].transpose(0, 1)


def chunk_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, h: Tensor, dh: Tensor, w: Tensor, g: Tensor, dv: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, w and the summed log decay inside chunks, given the states and their gradients.

    q, k [1, T, Hk, D]; v (after the delta correction), do, dv, w [1, T, Hv, D]; h, dh [1, T / CHUNK, Hv, D, D]: state
    at the start of a chunk and gradient of the state at its end; g [1, T, Hv]: decay summed inside the chunk, base 2.
    With state S of a chunk, o_i = scale (2^g_i q_i S + sum_j<=i 2^(g_i - g_j) (q_i k_j) v_j) and
    S' = 2^g_last S + sum_i 2^(g_last - g_i) k_i v_i; v_i itself holds - w_i S.
    """
    count, heads, key_heads = q.shape[1] // CHUNK, v.shape[2], q.shape[2]

    def split(x: Tensor) -> Tensor:
        x = x.view(count, CHUNK, x.shape[2], x.shape[3]).transpose(1, 2)
        if x.shape[1] != heads:
            x = x.repeat_interleave(heads // key_heads, dim=1)
        return x.reshape(count * heads, CHUNK, x.shape[-1])

    def join(x: Tensor) -> Tensor:
        return x.view(count, heads, CHUNK, -1).transpose(1, 2).reshape(1, count * CHUNK, heads, -1)

    dtype = v.dtype
    q, k, v, do, dv = (split(t) for t in (q, k, v, do, dv))
    h, dh = (t.reshape(count * heads, *t.shape[-2:]) for t in (h, dh))
    g = g.view(count, CHUNK, heads).transpose(1, 2).reshape(count * heads, CHUNK)
    last = g[:, -1:]
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = torch.exp2(torch.where(causal, g[:, :, None] - g[:, None, :], float("-inf"))) * scale
    scores = torch.bmm(do, v.transpose(1, 2)).float() * decay
    state = h.to(dtype).transpose(1, 2)
    q_state = torch.bmm(do, state).float() * torch.exp2(g)[..., None] * scale
    k_state = torch.bmm(v, dh.to(dtype).transpose(1, 2)).float() * torch.exp2(last - g)[..., None]
    dw = -torch.bmm(dv.to(dtype), state)
    dq = q_state + torch.bmm(scores.to(dtype), k).float()
    dk = k_state + torch.bmm(scores.to(dtype).transpose(1, 2), q).float()
    # The decay's gradient is what remains after large terms cancel. Each pair (i, j) is therefore taken once and used
    # with both signs, rather than from dq and dk, whose roundings differ; pairs with themselves cancel altogether.
    pairs = torch.where(causal.tril(-1), scores * torch.bmm(q, k.transpose(1, 2)).float(), 0.0)
    from_k = (k_state * k.float()).sum(-1)
    dg = (q_state * q.float()).sum(-1) - from_k + pairs.sum(2) - pairs.sum(1)
    dg_last = (h.float() * dh.float()).sum((1, 2)) * torch.exp2(last[:, 0]) + from_k.sum(1)
    dg = torch.cat([dg[:, :-1], dg[:, -1:] + dg_last[:, None]], dim=1)
    dq, dk = (join(t).view(1, count * CHUNK, key_heads, heads // key_heads, -1).sum(3).to(dtype) for t in (dq, dk))
    return dq, dk, join(dw), join(dg[..., None])[..., 0].contiguous()


def gpu_kernels(compiled: Callable[[Callable], Callable]) -> tuple[Callable, Callable]:
    """The gated delta rule and attention for a GPU.

    One backward kernel of flash-linear-attention is refused on Hopper with the Triton versions that miscompile it;
    ``chunk_gradients`` takes its place, which is possible because chunks never span two documents here.
    """
    chunk = importlib.import_module("fla.ops.gated_delta_rule.chunk")
    gradients = compiled(chunk_gradients)

    def replacement(q: Tensor, k: Tensor, v: Tensor, do: Tensor, h: Tensor, dh: Tensor, **other: Any) -> Any:
        return gradients(q, k, v, do, h, dh, other["w"], other["g"], other["dv"], other["scale"])

    chunk.chunk_bwd_dqkwg = replacement

    def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, row: Row) -> Tensor:
        out, _ = chunk.chunk_gated_delta_rule(
            q, k, v, decay, beta, cu_seqlens=row.cu_seqlens_long, chunk_indices=row.chunks
        )
        return out

    def attention(q: Tensor, k: Tensor, v: Tensor, row: Row) -> Tensor:
        cu, longest = row.cu_seqlens, row.longest
        return torch.ops.aten._flash_attention_forward(
            q, k, v, cu, cu, longest, longest, 0.0, True, False, scale=q.shape[-1] ** -0.5
        )[0]

    return delta_rule, attention


class PackedModel:
    """Applies a model (and its predictor) to packed rows."""

    def __init__(
        self,
        model: Qwen3_5ForCausalLM,
        predictor: MultiTokenPredictor,
        device: torch.device,
        compiles: bool = True,
        reference: bool = False,
    ) -> None:
        self.model, self.predictor, self.config, self.device = model, predictor, model.config, device
        on_gpu = device.type == "cuda" and not reference
        self.dtype = torch.bfloat16 if on_gpu else torch.float32

        def compiled(function: Callable) -> Callable:
            return torch.compile(function, fullgraph=True, dynamic=False) if on_gpu and compiles else function

        self.delta_rule, self.attention = (
            gpu_kernels(compiled) if on_gpu else (reference_delta_rule, reference_attention)
        )
        self.linear_in, self.linear_out = compiled(linear_in), compiled(linear_out)
        self.attention_in, self.attention_out = compiled(attention_in), compiled(attention_out)
        self.predictor_in, self.head_loss = compiled(predictor_in), compiled(head_loss)
        rope = self.config.rope_parameters
        rotary = int(self.config.head_dim * rope["partial_rotary_factor"])
        self.frequencies = rope["rope_theta"] ** (-torch.arange(0, rotary, 2, device=device).float() / rotary)

    def row(self, batch: Batch) -> Row:
        """Copies a batch to the device and computes its rotary angles."""

        def move(array: Any) -> Tensor:
            tensor = torch.from_numpy(array)
            return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

        tokens, positions, cu, chunks = (
            move(a) for a in (batch.tokens, batch.positions, batch.cu_seqlens, batch.chunks)
        )
        angles = positions[:, None].float() * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)[:, None]
        return Row(
            tokens.long(), positions, cu, cu.long(), chunks.long(), move(batch.loss_at).long(), move(batch.loss_weight),
            angles.cos(), angles.sin(), batch.longest,
        )  # fmt: skip

    def _layer(self, layer: nn.Module, x: Tensor, row: Row) -> Tensor:
        c, dtype = self.config, self.dtype
        mlp = layer.mlp
        tail = (layer.post_attention_layernorm.weight, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
        if hasattr(layer, "linear_attn"):
            m = layer.linear_attn
            *qkvgb, z = self.linear_in(
                x, row.positions, layer.input_layernorm.weight, m.in_proj_qkv.weight, m.in_proj_z.weight,
                m.in_proj_b.weight, m.in_proj_a.weight, m.conv1d.weight, m.A_log, m.dt_bias, c.linear_num_key_heads,
                c.linear_key_head_dim, dtype,
            )  # fmt: skip
            o = self.delta_rule(*qkvgb, row)
            return self.linear_out(x, o, z, m.norm.weight, m.out_proj.weight, *tail, dtype)
        m = layer.self_attn
        q, k, v, gate = self.attention_in(
            x, row.cos, row.sin, layer.input_layernorm.weight, m.q_proj.weight, m.k_proj.weight, m.v_proj.weight,
            m.q_norm.weight, m.k_norm.weight, c.head_dim, dtype,
        )  # fmt: skip
        return self.attention_out(x, self.attention(q, k, v, row), gate, m.o_proj.weight, *tail, dtype)

    def hidden(self, row: Row) -> Tensor:
        """Residual stream [T, H] after the last layer, before the final norm."""
        x = F.embedding(row.tokens, self.model.model.embed_tokens.weight)
        for layer in self.model.model.layers:
            x = self._layer(layer, x, row)
        return x

    def predicted(self, x: Tensor, row: Row) -> Tensor:
        """Residual stream [T, H] of the predictor: position t is about token t + 2. The model itself is not trained."""
        p = self.predictor
        embedding = self.model.model.embed_tokens.weight.detach()
        following = F.embedding(row.tokens.roll(-1), embedding)
        final = rms(x.detach(), self.model.model.norm.weight.detach())
        y = self.predictor_in(
            final, following, p.pre_fc_norm_hidden.weight, p.pre_fc_norm_embedding.weight, p.fc.weight, self.dtype
        )
        return self._layer(p.layers[0], y, row)

    def losses(self, row: Row, with_predictor: bool) -> tuple[Tensor, Tensor | None]:
        """The model's loss and, if asked for, the predictor's."""
        x = self.hidden(row)
        embedding = self.model.model.embed_tokens.weight
        at, weight = row.loss_at, row.loss_weight
        loss = self.head_loss(
            x, self.model.model.norm.weight, embedding, at, row.tokens.roll(-1)[at], weight, self.dtype
        )
        if not with_predictor:
            return loss, None
        # The predictor is trained one position earlier: at t it tells what the model tells at t + 1.
        earlier = (at - 1).clamp(min=0)
        y = self.predicted(x, row)
        predictor_loss = self.head_loss(
            y, self.predictor.norm.weight, embedding.detach(), earlier, row.tokens.roll(-1)[at], weight, self.dtype
        )
        return loss, predictor_loss

    def choices(self, row: Row) -> tuple[Tensor, Tensor]:
        """Greedy next tokens [T] of the model, and of the predictor (for the token after the next one).

        Gradients stay enabled, because the compiled pieces would be compiled again without them.
        """
        x = self.hidden(row)
        y = self.predicted(x, row)
        embedding = self.model.model.embed_tokens.weight
        found = []
        for h, norm in ((x, self.model.model.norm.weight), (y, self.predictor.norm.weight)):
            with torch.no_grad():
                parts = [_product(rms(part, norm), embedding, self.dtype).argmax(-1) for part in h.split(16384)]
            found.append(torch.cat(parts))
        return found[0], found[1]
