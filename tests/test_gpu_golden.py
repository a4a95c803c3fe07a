"""The golden gate: log-probabilities of transformers on the same device, for models cut to 8 layers at true widths.

Bireme answers greedily; transformers then reads prompt and answer, in bfloat16 and in float32, and both scores of each
position's most likely tokens are compared. How far bfloat16 may be off is known twice: from fixed bounds, and from how
far transformers' own bfloat16 run is from its float32 run. Every test prints its figures.

On a CPU the same runs on a tiny model. There the fixed bounds do not apply: narrow random models are noisier.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tools import Answer, run, scores
from torch import Tensor

from bireme.bench.geometry import write_weights
from bireme.checkpoint.hf_config import load_model_config
from bireme.engine import EngineCore
from bireme.engine_args import build_engine_config
from bireme.executor.launcher import create_executor
from bireme.types import Request, SamplingParams

NUM_OUTPUT = 12
TOP = 20
BOUNDS = {"mean": 0.06, "p99": 0.20, "regret": 0.20}
"""Nats, against transformers in bfloat16."""

GEOMETRIES = [
    pytest.param("tiny:4", id="tiny-cpu"),
    pytest.param("4b:8", marks=pytest.mark.gpu),
    pytest.param("27b:8", marks=pytest.mark.gpu),
]


@dataclass
class Golden:
    """A checkpoint, its references, and what they have said so far."""

    folder: Path
    device: str
    prompts: list[list[int]]
    max_batched: int
    references: dict[str, Any] = field(default_factory=dict)
    known: dict[tuple[str, tuple[int, ...]], Tensor] = field(default_factory=dict)

    @torch.inference_mode()
    def reference(self, name: str, token_ids: list[int], num_last: int) -> Tensor:
        """[num_last, V] float32 log-probabilities of what follows each of the last ``num_last`` tokens."""
        key = (name, tuple(token_ids))
        if key not in self.known:
            model = self.references[name]
            ids = torch.tensor([token_ids], device=self.device)
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0, -num_last:]
            self.known[key] = model.lm_head(hidden).float().log_softmax(-1)
        return self.known[key]


@pytest.fixture(scope="module", params=GEOMETRIES)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Golden]:
    import transformers

    geometry = request.param
    on_gpu = not geometry.startswith("tiny")
    device = "cuda:0" if on_gpu else "cpu"
    folder = tmp_path_factory.mktemp("golden")
    write_weights(folder, geometry, device=device)
    lengths = [5, 63, 64, 65, 200, 4097, 8192] if on_gpu else [5, 63, 64, 65, 200, 257]
    generator = torch.Generator().manual_seed(11)
    vocab_size = load_model_config(folder).vocab_size
    prompts = [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    case = Golden(folder, device, prompts, 4096 if on_gpu else 128)
    # Straight onto the device where that can be done: host memory is slow to come by on some machines.
    placed = {"device_map": device} if on_gpu and importlib.util.find_spec("accelerate") else {}
    model = transformers.Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **placed).eval().to(device)
    case.references = {"bfloat16": model, "float32": copy.deepcopy(model).float()}
    yield case
    case.references.clear()
    case.known.clear()
    del case, model
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    shutil.rmtree(folder)


def engine_for(golden: Golden, *, eager: bool = False, tp_size: int = 1) -> EngineCore:
    config = build_engine_config(
        str(golden.folder),
        device=golden.device,
        dtype="bfloat16",
        tensor_parallel_size=tp_size,
        enforce_eager=eager,
        max_num_seqs=12,
        max_num_batched_tokens=golden.max_batched,
        max_model_len=max(map(len, golden.prompts)) + NUM_OUTPUT,
        kv_cache_memory_bytes=(3 << 30) if golden.device != "cpu" else (300 << 20),
    )
    return EngineCore(config, create_executor(config))


@pytest.fixture(scope="module")
def engines(golden: Golden) -> Iterator[Callable[..., EngineCore]]:
    """Engines by what is asked of them; one at a time, so that their memory does not add up."""
    current: dict[str, EngineCore] = {}

    def get(**options: Any) -> EngineCore:
        key = repr(options)
        if key not in current:
            stop()
            current[key] = engine_for(golden, **options)
        return current[key]

    def stop() -> None:
        for engine in current.values():
            engine.shutdown()
        current.clear()
        gc.collect()
        if golden.device != "cpu":
            torch.cuda.empty_cache()

    yield get
    stop()


def ask(index: int, prompt: list[int], *, prompt_logprobs: int | None = None) -> Request:
    params = SamplingParams(
        temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=TOP, prompt_logprobs=prompt_logprobs
    )
    return Request(str(index), prompt, params)


def check(golden: Golden, prompts: dict[str, list[int]], answers: dict[str, Answer], label: str, capsys: Any) -> None:
    """Compare every answer's tokens, then assert over all of them together."""
    to_bf16: list[Tensor] = []
    to_float32: list[Tensor] = []
    noise: list[Tensor] = []
    regrets: list[float] = []
    worst = ("", 0.0)
    for key, answer in answers.items():
        assert len(answer.token_ids) == NUM_OUTPUT
        tokens = prompts[key] + answer.token_ids[:-1]
        bf16 = golden.reference("bfloat16", tokens, NUM_OUTPUT)
        float32 = golden.reference("float32", tokens, NUM_OUTPUT)
        for at, entry in enumerate(answer.logprobs):
            found = scores(entry)
            ids = torch.tensor(list(found), device=bf16.device)
            ours = torch.tensor(list(found.values()), device=bf16.device)
            to_bf16.append((ours - bf16[at, ids]).abs())
            to_float32.append((ours - float32[at, ids]).abs())
            noise.append((bf16[at, ids] - float32[at, ids]).abs())
            regrets.append((bf16[at].max() - bf16[at, answer.token_ids[at]]).item())
            if to_bf16[-1].max().item() > worst[1]:
                worst = (f"prompt of {len(prompts[key])} tokens, output {at}", to_bf16[-1].max().item())
    near, far, own = torch.cat(to_bf16), torch.cat(to_float32), torch.cat(noise)
    figures = {
        "mean": near.mean().item(),
        "p99": near.quantile(0.99).item(),
        "regret": max(regrets),
        "mean_to_float32": far.mean().item(),
        "p99_to_float32": far.quantile(0.99).item(),
        "transformers_mean_to_float32": own.mean().item(),
        "transformers_p99_to_float32": own.quantile(0.99).item(),
    }
    with capsys.disabled():
        shown = ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
        print(f"\n{golden.folder.name} {label}: {shown}; worst {worst[1]:.4f} ({worst[0]})")
    assert all(value == value for value in figures.values()), "NaN among the log-probabilities"
    if golden.device != "cpu":
        for name, bound in BOUNDS.items():
            assert figures[name] <= bound, (
                f"{label}: {name} is {figures[name]:.4f}, at most {bound} is allowed ({worst})"
            )
    for name in ("mean", "p99"):
        own_figure = figures[f"transformers_{name}_to_float32"]
        allowed = 1.5 * own_figure + (0.005 if name == "mean" else 0.03)
        value = figures[f"{name}_to_float32"]
        assert value <= allowed, (
            f"{label}: {name} distance to float32 is {value:.4f}; transformers' own in bfloat16 is {own_figure:.4f} "
            f"({worst})"
        )


def named(prompts: list[list[int]]) -> dict[str, list[int]]:
    return {str(index): prompt for index, prompt in enumerate(prompts)}


def test_one_row_alone_in_graphs(golden: Golden, engines: Callable[..., EngineCore], capsys: Any) -> None:
    engine = engines()
    prompts = named(golden.prompts)
    answers: dict[str, Answer] = {}
    for key, prompt in prompts.items():
        answers |= run(engine, [ask(int(key), prompt)])
    check(golden, prompts, answers, "alone, graphs", capsys)


def test_all_prompts_at_once_in_graphs(golden: Golden, engines: Callable[..., EngineCore], capsys: Any) -> None:
    prompts = named(golden.prompts)
    answers = run(engines(), [ask(index, prompt) for index, prompt in enumerate(golden.prompts)])
    check(golden, prompts, answers, "batched, graphs", capsys)


def test_nine_rows_padded_past_a_bucket_after_slots_were_used(
    golden: Golden, engines: Callable[..., EngineCore], capsys: Any
) -> None:
    engine = engines()
    run(engine, [ask(index, prompt[::-1]) for index, prompt in enumerate(golden.prompts)])  # leaves state behind
    short = [prompt for prompt in golden.prompts if len(prompt) <= 200]
    prompts = named([prompt[cut:] for cut in (0, 3) for prompt in short][:9])
    answers = run(engine, [ask(int(key), prompt) for key, prompt in prompts.items()])
    check(golden, prompts, answers, "nine rows in a bucket of twelve", capsys)


def test_long_prompts_that_arrive_while_others_decode(
    golden: Golden, engines: Callable[..., EngineCore], capsys: Any
) -> None:
    order = sorted(range(len(golden.prompts)), key=lambda index: len(golden.prompts[index]))
    prompts = named(golden.prompts)
    requests = [ask(index, golden.prompts[index]) for index in order]
    answers = run(engines(), requests, [2 * number for number in range(len(order))])
    check(golden, prompts, answers, "arriving one after another", capsys)


def test_prompt_log_probabilities(golden: Golden, engines: Callable[..., EngineCore], capsys: Any) -> None:
    prompt = golden.prompts[4]
    answer = run(engines(), [ask(0, prompt, prompt_logprobs=TOP)])["0"]
    assert answer.prompt_logprobs is not None and answer.prompt_logprobs[0] is None
    bf16 = golden.reference("bfloat16", prompt, len(prompt))[:-1]
    float32 = golden.reference("float32", prompt, len(prompt))[:-1]
    ours, ids = [], []
    for entry in answer.prompt_logprobs[1:]:
        assert entry is not None
        ids.append(entry.top_ids)
        ours.append(entry.top_logprobs)
    chosen = torch.tensor(ids, device=bf16.device)
    values = torch.tensor(ours, device=bf16.device)
    distance = (values - float32.gather(1, chosen)).abs()
    own = (bf16.gather(1, chosen) - float32.gather(1, chosen)).abs()
    with capsys.disabled():
        print(f"\nprompt positions: mean to float32 {distance.mean():.4f}, transformers' own {own.mean():.4f}")
    assert distance.mean() <= 1.5 * own.mean() + 0.005


def test_a_prompt_that_differs_is_told_apart(golden: Golden) -> None:
    """The bounds mean something: what came before moves the log-probabilities by more than they allow."""
    prompt = golden.prompts[4]
    other = prompt[:-20] + prompt[:10] + prompt[-10:]
    plain = golden.reference("float32", prompt, 1)[0]
    moved = golden.reference("float32", other, 1)[0]
    top = plain.topk(TOP).indices
    assert (plain[top] - moved[top]).abs().mean() > 2 * BOUNDS["mean"]


@pytest.mark.parametrize("together", [False, True], ids=["alone", "batched"])
def test_without_graphs(golden: Golden, engines: Callable[..., EngineCore], together: bool, capsys: Any) -> None:
    engine = engines(eager=True)
    prompts = named(golden.prompts)
    requests = [ask(index, prompt) for index, prompt in enumerate(golden.prompts)]
    answers: dict[str, Answer] = {}
    if together:
        answers = run(engine, requests)
    else:
        for each in requests:
            answers |= run(engine, [each])
    check(golden, prompts, answers, f"{'batched' if together else 'alone'}, eager", capsys)


def test_two_ranks(golden: Golden, engines: Callable[..., EngineCore], capsys: Any) -> None:
    """Both ranks share the device: sums pass through host memory, so nothing runs in a graph."""
    prompts = named(golden.prompts)
    answers = run(engines(tp_size=2), [ask(index, prompt) for index, prompt in enumerate(golden.prompts)])
    check(golden, prompts, answers, "two ranks", capsys)
