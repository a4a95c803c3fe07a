"""Batched sampling: slot tables of parameters, logits processors, filters, counter-based draws, log-probabilities."""
