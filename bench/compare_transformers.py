"""Greedy decoding of the same weights by transformers' ``generate`` and by Bireme, in turns within one run.

    python bench/compare_transformers.py [MODEL] [--rows 1 16] [--tokens 256] [--rounds 3] [--append FILE]

Without MODEL a tiny random model is written to a temporary folder. Prints a table and one JSON line. Each side gets the
whole machine while it runs: Bireme's ranks are started for its turn and ended after it, and loading is not timed.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from bireme.bench.decode import PlanRelay, bench_prompts, describe, model_folder, run_engine
from bireme.bench.record import emit, median, record
from bireme.config import EngineConfig
from bireme.engine_args import build_engine_config
from bireme.executor.launcher import create_executor


def run_transformers(model: Any, prompts: list[list[int]], num_tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds and token ids of one greedy batch; the prompts have one length, so nothing is padded."""
    input_ids = torch.tensor(prompts, device=model.device)
    started = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
        )
    token_ids = output[:, input_ids.shape[1] :].tolist()
    return time.perf_counter() - started, token_ids


def run_bireme(
    config: EngineConfig, prompt_sets: list[list[list[int]]], num_tokens: int
) -> list[tuple[float, list[list[int]]]]:
    """Seconds and token ids of each set of prompts on ranks of their own, after a short warm-up."""
    executor = create_executor(config)
    try:
        relay = PlanRelay(executor)
        results = []
        for prompts in prompt_sets:
            run_engine(relay, config, prompts, 8)
            seconds, _, _, token_ids = run_engine(relay, config, prompts, num_tokens)
            results.append((seconds, token_ids))
        return results
    finally:
        executor.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--append", type=Path)
    args = parser.parse_args()

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    threads = torch.get_num_threads()
    with model_folder(args.model) as (folder, builtin):
        config = build_engine_config(folder, tensor_parallel_size=args.tp, dtype=args.dtype)
        oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype)).to(config.device).eval()
        oracle.generation_config.eos_token_id = None
        oracle.generation_config.pad_token_id = 0
        prompt_sets = [bench_prompts(config.model.vocab_size, rows, args.prompt_tokens) for rows in args.rows]
        theirs: list[list[float]] = [[] for _ in args.rows]
        ours: list[list[float]] = [[] for _ in args.rows]
        num_equal = [0] * len(args.rows)
        for prompts in prompt_sets:
            run_transformers(oracle, prompts, 8)
        for _ in range(args.rounds):
            their_ids = []
            torch.set_num_threads(threads)
            for index, prompts in enumerate(prompt_sets):
                seconds, token_ids = run_transformers(oracle, prompts, args.tokens)
                theirs[index].append(seconds)
                their_ids.append(token_ids)
            for index, (seconds, token_ids) in enumerate(run_bireme(config, prompt_sets, args.tokens)):
                ours[index].append(seconds)
                num_equal[index] = sum(a == b for a, b in zip(token_ids, their_ids[index], strict=True))

    table = Table(title=f"greedy decoding, {args.tokens} tokens each, TP{args.tp}, {args.dtype}", title_justify="left")
    for name in ("rows", "transformers ms/step", "Bireme ms/step", "ahead", "equal completions"):
        table.add_column(name, justify="right")
    results = []
    for index, rows in enumerate(args.rows):
        their_ms = median(theirs[index]) / args.tokens * 1e3
        our_ms = median(ours[index]) / args.tokens * 1e3
        table.add_row(
            str(rows), f"{their_ms:.2f}", f"{our_ms:.2f}", f"{their_ms / our_ms:.2f} ×", f"{num_equal[index]} of {rows}"
        )
        results.append(
            {
                "rows": rows,
                "transformers_ms_per_step": round(their_ms, 3),
                "bireme_ms_per_step": round(our_ms, 3),
                "ratio": round(their_ms / our_ms, 2),
                "equal_completions": num_equal[index],
            }
        )
    Console().print(table)
    line = record(
        "compare_transformers",
        model=describe(config, builtin),
        tp=args.tp,
        device=config.device,
        dtype=args.dtype,
        tokens=args.tokens,
        prompt_tokens=args.prompt_tokens,
        rounds=args.rounds,
        threads=threads,
        results=results,
    )
    emit(line, args.append)


if __name__ == "__main__":
    main()
