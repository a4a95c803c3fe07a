"""What tests of whole engines share: requests in, answers out, in this process and on any device."""

from __future__ import annotations

from dataclasses import dataclass, field

from bireme.engine import EngineCore
from bireme.types import FinishReason, Request, TokenLogprobs


@dataclass
class Answer:
    """What a request got, token by token."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None


def run(engine: EngineCore, requests: list[Request], arrivals: list[int] | None = None) -> dict[str, Answer]:
    """Answers by id; request i is added once ``arrivals[i]`` steps have run (all at once without)."""
    waiting = list(zip(arrivals or [0] * len(requests), requests, strict=True))
    answers = {request.request_id: Answer() for request in requests}
    number = 0
    while waiting or engine.has_unfinished:
        for _, due in [entry for entry in waiting if entry[0] <= number]:
            engine.add_request(due)
        waiting = [entry for entry in waiting if entry[0] > number]
        number += 1
        if not engine.has_unfinished:
            continue
        for output in engine.step():
            assert output.error is None
            answer = answers[output.request_id]
            answer.token_ids += output.token_ids
            answer.logprobs += output.logprobs or []
            answer.prompt_logprobs = output.prompt_logprobs or answer.prompt_logprobs
            answer.finish_reason = output.finish_reason or answer.finish_reason
    engine.assert_idle()
    return answers


def scores(entry: TokenLogprobs) -> dict[int, float]:
    """Log-probability by id: the most likely tokens and the chosen one."""
    return dict(zip(entry.top_ids, entry.top_logprobs, strict=True)) | {entry.token_id: entry.logprob}
