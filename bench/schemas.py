"""Every schema of a suite on the embedded model: refused with a reason, or followed by an answer that validates.

    python bench/schemas.py [--suite FILE] [--samples 2] [--max-tokens 256] [--reasons] [--append FILE]

The suite is one JSON object a line: file, description, schema. Each schema that is accepted gets ``--samples`` seeded
answers; one that ends by itself must validate (``jsonschema``, formats included). One that runs out of tokens is
counted and not judged. Prints one JSON line, and the reasons of refusals on stderr with ``--reasons``; the exit code is
1 if an answer did not validate.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema

from bireme import LLM, SamplingParams, StructuredOutputsParams
from bireme.bench.record import emit, record
from bireme.errors import InvalidRequestError

SUITE = Path(__file__).resolve().parents[1] / "tests" / "data" / "json_schema_suite.jsonl"
UNCHECKED = "the validator cannot read an expression of the schema:"
PROMPT = [{"role": "user", "content": 'Give me JSON like {"name": "Ada", "points": [1, 2], "paid": true}.'}]


def read_suite(path: Path) -> list[dict[str, Any]]:
    """The schemas, each with where it is from."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def why_invalid(text: str, schema: Any) -> str | None:
    """Why ``text`` is no instance of ``schema``, or None if it is one."""
    try:
        instance = json.loads(text)
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        kind(schema, format_checker=kind.FORMAT_CHECKER).validate(instance)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    except re.error as error:
        return f"{UNCHECKED} {error}"
    return None


def prepare(llm: LLM, schemas: list[dict[str, Any]]) -> tuple[list[StructuredOutputsParams | None], list[str]]:
    """The forms of those that are accepted (None for the others), and the reasons of the refusals."""
    forms: list[StructuredOutputsParams | None] = []
    reasons = []
    for each in schemas:
        form = StructuredOutputsParams(json=json.dumps(each["schema"]))
        try:
            llm.check_form(SamplingParams(structured_outputs=form))
            forms.append(form)
        except InvalidRequestError as error:
            forms.append(None)
            reasons.append(f"{each['file']}: {each['description']}: {error}")
    return forms, reasons


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", type=Path, default=SUITE)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--reasons", action="store_true")
    parser.add_argument("--append", type=Path, metavar="FILE")
    args = parser.parse_args()

    schemas = read_suite(args.suite)
    counts: Counter[str] = Counter()
    wrong = []
    with LLM("pocket", dtype="float32", max_num_seqs=32) as llm:
        started = time.monotonic()
        forms, reasons = prepare(llm, schemas)
        prepare_seconds = time.monotonic() - started
        jobs = [(each, form) for each, form in zip(schemas, forms, strict=True) if form is not None]
        jobs = [job for job in jobs for _ in range(args.samples)]
        params = [
            SamplingParams(temperature=1.0, seed=number, max_tokens=args.max_tokens, structured_outputs=form)
            for number, (_, form) in enumerate(jobs)
        ]
        started = time.monotonic()
        results = llm.chat([PROMPT] * len(jobs), params, chat_template_kwargs={"enable_thinking": False})
        seconds = time.monotonic() - started
    finished = set()
    for (each, _), result in zip(jobs, results, strict=True):
        answer = result.outputs[0]
        if answer.finish_reason != "stop":
            counts["cut"] += 1
            continue
        finished.add(json.dumps(each))
        reason = why_invalid(answer.text, each["schema"])
        verdict = "valid" if reason is None else "unchecked" if reason.startswith(UNCHECKED) else "invalid"
        counts[verdict] += 1
        if verdict == "invalid":
            wrong.append(f"{each['file']}: {each['description']}: {answer.text!r}: {reason}")
    kinds = Counter(_kind(reason) for reason in reasons)
    line = record(
        "schemas",
        suite=args.suite.name,
        schemas=len(schemas),
        accepted=len(schemas) - len(reasons),
        refused=len(reasons),
        accepted_with_an_answer=len(finished),
        answers=len(jobs),
        **{name: counts[name] for name in ("valid", "invalid", "unchecked", "cut")},
        max_tokens=args.max_tokens,
        prepare_seconds=round(prepare_seconds, 2),
        seconds=round(seconds, 1),
        refusals=dict(kinds.most_common()),
    )
    print("\n".join(wrong + (reasons if args.reasons else [])), file=sys.stderr)
    emit(line, args.append)
    return 1 if counts["invalid"] else 0


def _kind(reason: str) -> str:
    """A refusal without what is particular to its schema."""
    reason = reason.partition("cannot be followed")[2].partition(": ")[2] or reason.rpartition("outputs ")[2]
    return reason if reason.startswith("Unimplemented keys") else reason.partition(":")[0]


if __name__ == "__main__":
    sys.exit(main())
