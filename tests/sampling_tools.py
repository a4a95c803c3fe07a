"""Shared by the sampling tests: installing requests, and the definition of a row's token in plain Python."""

import math

import numpy as np
import torch

from bireme.sampling.params import SlotSampling
from bireme.sampling.sampler import Sampler
from bireme.types import NewRequest, SamplingParams

MASK = 0xFFFFFFFF
VOCAB = 300


def new_request(slot, *, prompt=(1, 2, 3), suppressed=(), seed=0, **params):
    return NewRequest(slot, list(prompt), [], SamplingParams(seed=seed, max_tokens=None, **params), list(suppressed))


def sampler_with(requests, *, num_slots=16, vocab_size=VOCAB, masked=()):
    tables = SlotSampling(num_slots, vocab_size, torch.device("cpu"), list(masked))
    for request in requests:
        tables.install(request)
    return Sampler(tables)


def draw(sampler, logits, slots, positions):
    """Token ids as a list; the logits are left alone."""
    return sampler(logits.clone(), slots, torch.tensor(positions)).token_ids.tolist()


def python_philox(counter, key):
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def python_uniform(seed, position, token_id):
    key = (seed & MASK, (seed >> 32) & MASK)
    return (python_philox((token_id // 4, position, 0, 0), key)[token_id % 4] + 0.5) / 2**32


def processed(row, request, output, masked=()):
    """A row's logits after all processors, as float32."""
    params, row = request.params, np.array(row, dtype=np.float32)
    for start, end in masked:
        row[start:end] = -np.inf
    for token_id, bias in (params.logit_bias or {}).items():
        row[token_id] += np.float32(bias)
    for token_id in set(request.prompt_token_ids) | set(output):
        penalty = np.float32(params.repetition_penalty)
        row[token_id] = row[token_id] / penalty if row[token_id] > 0 else row[token_id] * penalty
    for token_id in set(output):
        row[token_id] -= np.float32(params.frequency_penalty) * np.float32(output.count(token_id))
        row[token_id] -= np.float32(params.presence_penalty)
    if len(output) < params.min_tokens:
        row[request.suppressed_token_ids] = -np.inf
    return row


def token_by_definition(row, request, output=(), masked=()):
    """The token that the design prescribes for a row, one row at a time in float64."""
    params, output = request.params, list(output)
    row = processed(row, request, output, masked)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if params.is_greedy:
        return order[0]
    if 0 < params.top_k < len(row):
        order = order[: params.top_k]
    weights = [math.exp((float(row[i]) - float(row[order[0]])) / params.temperature) for i in order]
    total, mass, scores = sum(weights), 0.0, {}
    for token_id, weight in zip(order, weights, strict=True):
        if mass >= params.top_p * total and params.top_p < 1.0:
            break
        mass += weight
        if weight > 0 and weight >= params.min_p:
            scores[token_id] = -weight / math.log(python_uniform(params.seed, len(output), token_id))
    return max(scores, key=lambda token_id: scores[token_id])
