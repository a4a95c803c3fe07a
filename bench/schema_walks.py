"""Grammar libraries on a suite of schemas: which accept a schema, and does all that they then allow satisfy it?

    python bench/schema_walks.py [--library llguidance|xgrammar] [--walks 4] [--max-tokens 300] [--append FILE]

No model: each walk draws any token that the library's mask allows, with the pocket model's tokenizer, and ends at the
first end token that is allowed. ``jsonschema`` judges what it spells. xgrammar (and apache-tvm-ffi) is not among
Bireme's requirements: install it for its line. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from schemas import SUITE, UNCHECKED, read_suite, why_invalid
from tokenizers import Tokenizer

from bireme.bench.record import emit, record
from bireme.pocket import MODEL_DIR
from bireme.sampling.grammar import GrammarCompiler
from bireme.types import StructuredOutputsParams

VOCAB_SIZE = json.loads((MODEL_DIR / "config.json").read_text())["vocab_size"]

Walker = tuple[Callable[[], np.ndarray], Callable[[int], bool]]
"""The mask of the next token, int32 words; and what takes a token, True if it may."""


def llguidance(end_id: int) -> Callable[[str], Callable[[], Walker]]:
    """Makes a schema's walkers as the engine follows a form; raises where the schema is refused."""
    compiler = GrammarCompiler(MODEL_DIR / "tokenizer.json", VOCAB_SIZE, [end_id])

    def compile_schema(schema: str) -> Callable[[], Walker]:
        grammar = compiler.prepare(StructuredOutputsParams(json=schema)).result()

        def start() -> Walker:
            matcher = grammar.matcher.deep_copy()
            words = np.zeros((VOCAB_SIZE + 31) // 32, dtype=np.int32)

            def mask() -> np.ndarray:
                matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
                return words

            return mask, matcher.consume_token

        return start

    return compile_schema


def xgrammar(end_id: int) -> Callable[[str], Callable[[], Walker]]:
    """The same by xgrammar, as it is by default."""
    library: Any = importlib.import_module("xgrammar")
    vocab = [""] * VOCAB_SIZE
    for text, token in Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")).get_vocab().items():
        vocab[token] = text
    kind = library.VocabType.BYTE_LEVEL
    info = library.TokenizerInfo(vocab, kind, vocab_size=VOCAB_SIZE, stop_token_ids=[end_id])
    compiler = library.GrammarCompiler(info, max_threads=1)

    def compile_schema(schema: str) -> Callable[[], Walker]:
        grammar = compiler.compile_json_schema(schema)

        def start() -> Walker:
            matcher = library.GrammarMatcher(grammar)
            words = library.allocate_token_bitmask(1, VOCAB_SIZE)

            def mask() -> np.ndarray:
                words.fill_(-1)
                matcher.fill_next_token_bitmask(words)
                return words.numpy()[0]

            return mask, matcher.accept_token

        return start

    return compile_schema


LIBRARIES = {"llguidance": llguidance, "xgrammar": xgrammar}


def walk(walker: Walker, end_id: int, max_tokens: int, pick: random.Random) -> list[int] | None:
    """The tokens up to the first allowed end; None if there is none within ``max_tokens``."""
    mask, take = walker
    tokens: list[int] = []
    for _ in range(max_tokens):
        allowed = np.unpackbits(mask().view(np.uint8), bitorder="little")[:VOCAB_SIZE]
        if allowed[end_id] and tokens:
            return tokens
        allowed[end_id] = 0
        ids = np.flatnonzero(allowed).tolist()
        if not ids:
            return None
        tokens.append(pick.choice(ids))
        if not take(tokens[-1]):
            return None
    return None


def verdict(text: str, schema: Any) -> str:
    """What ``jsonschema`` says: valid, invalid or unchecked."""
    try:
        reason = why_invalid(text, schema)
    except Exception:  # a reference that the validator cannot resolve; its classes have no common base
        return "unchecked"
    return "valid" if reason is None else "unchecked" if reason.startswith(UNCHECKED) else "invalid"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", choices=LIBRARIES, default="llguidance")
    parser.add_argument("--walks", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--append", type=Path, metavar="FILE")
    args = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    end_id = tokenizer.token_to_id("<|im_end|>")
    compile_schema = LIBRARIES[args.library](end_id)
    schemas = read_suite(SUITE)
    counts: Counter[str] = Counter()
    wrong = set()
    compile_seconds, num_accepted = 0.0, 0
    for number, each in enumerate(schemas):
        started = time.monotonic()
        try:
            start = compile_schema(json.dumps(each["schema"]))
        except Exception:  # each library refuses in its own way
            continue
        finally:
            compile_seconds += time.monotonic() - started
        num_accepted += 1
        for walk_number in range(args.walks):
            tokens = walk(start(), end_id, args.max_tokens, random.Random(number * 1000 + walk_number))
            text = "" if tokens is None else tokenizer.decode(tokens, skip_special_tokens=False)
            found = "cut" if tokens is None else verdict(text, each["schema"])
            counts[found] += 1
            if found == "invalid":
                wrong.add(number)
    emit(
        record(
            "schema_walks",
            library=args.library,
            library_version=importlib.metadata.version(args.library),
            schemas=len(schemas),
            accepted=num_accepted,
            accepted_with_an_invalid_walk=len(wrong),
            walks=num_accepted * args.walks,
            **{name: counts[name] for name in ("valid", "invalid", "unchecked", "cut")},
            max_tokens=args.max_tokens,
            compile_seconds=round(compile_seconds, 2),
        ),
        args.append,
    )


if __name__ == "__main__":
    main()
