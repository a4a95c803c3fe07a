"""Who may import whom: the table of the architecture page, read off the source by ast.

A rule covers a module and everything below it; the longest matching prefix applies. ``inside`` lists what else of the
package it may import, at any level of nesting; ``outside`` the heavy third-party libraries it may import. ``late`` adds
what only a function body may import. An import under ``if TYPE_CHECKING`` never runs: it may name what is allowed late.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"
HEAVY = {
    "torch",
    "triton",
    "fla",
    "transformers",
    "fastapi",
    "starlette",
    "uvicorn",
    "zmq",
    "tokenizers",
    "safetensors",
    "llguidance",
    "opentelemetry",
}
BASE = {"types", "config", "errors"}


@dataclass(frozen=True)
class Rule:
    inside: frozenset[str]
    outside: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()


def rule(inside: set[str], outside: set[str] | None = None, late: set[str] | None = None) -> Rule:
    return Rule(frozenset(inside), frozenset(outside or ()), frozenset(late or ()))


RULES = {
    "": rule({"types"}, late={"llm", "openmp"}),
    "openmp": rule(set()),
    "types": rule(BASE),
    "config": rule(BASE),
    "errors": rule(BASE),
    "validation": rule(BASE),
    "step_account": rule(BASE),
    "structured": rule(BASE, late={"llguidance"}),
    "checkpoint": rule(BASE | {"checkpoint"}),
    "checkpoint.loader": rule(BASE | {"checkpoint"}, {"torch", "safetensors"}),
    "distributed": rule(BASE, {"torch"}),
    "kernels": rule({"kernels"}, {"torch", "triton", "fla"}),
    "layers": rule({"layers", "kernels", "distributed", "config", "errors"}, {"torch"}),
    "models": rule({"models", "layers", "kernels", "distributed", "config", "errors"}, {"torch"}),
    "cache": rule(BASE | {"cache"}),
    "cache.kv_pool": rule(BASE | {"cache"}, {"torch"}),
    "cache.state_pool": rule(BASE | {"cache"}, {"torch"}),
    "scheduler": rule(
        BASE | {"scheduler", "cache.block_allocator", "cache.prefix_index", "cache.capacity"},
    ),
    "sampling": rule({"sampling", "types", "errors", "kernels"}, {"torch"}),
    "sampling.grammar": rule({"sampling", "types", "errors", "structured"}, {"torch", "llguidance"}),
    "executor": rule(
        BASE | {"executor", "models", "layers", "kernels", "checkpoint", "cache", "sampling", "distributed"}, {"torch"}
    ),
    "executor.protocol": rule(BASE),
    "engine": rule(BASE | {"step_account", "validation", "scheduler", "executor.protocol", "cache.capacity"}),
    "sim": rule(BASE | {"executor.protocol", "cache.capacity"}),
    "engine_args": rule(BASE | {"checkpoint", "cache.capacity"}, late={"torch", "tokenizers"}),
    "engine_process": rule(BASE | {"step_account"}, {"zmq"}, late={"engine", "executor", "sim", "torch"}),
    "engine_client": rule(BASE | {"engine_process", "step_account"}, {"zmq"}),
    "server": rule(
        BASE | {"", "server", "validation", "structured", "engine_client", "engine_process", "step_account"},
        {"fastapi", "starlette", "uvicorn", "tokenizers"},
    ),
    "server.tokenizer": rule(BASE | {"server"}, {"tokenizers"}),
    "server.detokenizer": rule(BASE | {"server"}, {"tokenizers"}),
    "server.telemetry": rule(BASE | {"", "server"}, late={"opentelemetry"}),
    "server.text_state": rule(BASE | {"server"}),
    "llm": rule(
        BASE
        | {"validation", "engine", "engine_args", "executor", "checkpoint", "server.tokenizer", "server.detokenizer"}
        | {"server.text_state", "server.chat", "server.messages", "server.tools", "pocket"},
    ),
    "dummy": rule(BASE | {"checkpoint"}, {"torch", "safetensors", "tokenizers"}),
    "local_server": rule(BASE),
    "__main__": rule({"cli"}),
    "cli": rule({"", "cli", "openmp", *BASE}, late={"*"}),
    "demo": rule({"", "*"}, late={"*"}),
    "bench": rule({"", "*"}, HEAVY, late={"*"}),
    "pocket": rule({"", "*"}, HEAVY, late={"*"}),
}

NEVER = {
    "checkpoint": {"models"},
    "distributed": {"engine"},
    "kernels": {"config", "cache", "layers"},
    "layers": {"cache", "scheduler"},
    "models": {"cache", "scheduler"},
    "cache": {"scheduler"},
    "scheduler": {"torch", "executor", "server"},
    "sampling": {"scheduler"},
    "executor": {"scheduler", "server"},
    "engine": {"fastapi", "torch", "server"},
    "llm": {"fastapi", "uvicorn"},
    "sim": {"fastapi", "torch"},
    "server": {"torch", "scheduler", "executor"},
}
"""The last column of the table, kept apart so that no edit of RULES can grant it by accident."""

TORCH_FREE = [
    "bireme",
    "bireme.types",
    "bireme.config",
    "bireme.errors",
    "bireme.engine",
    "bireme.sim",
    "bireme.scheduler",
    "bireme.scheduler.plan",
    "bireme.scheduler.scheduler",
    "bireme.scheduler.ledger",
    "bireme.cache.block_allocator",
    "bireme.cache.capacity",
    "bireme.checkpoint.names",
    "bireme.checkpoint.shard_spec",
    "bireme.checkpoint.hf_config",
    "bireme.executor.protocol",
    "bireme.engine_args",
    "bireme.engine_client",
    "bireme.engine_process",
    "bireme.server",
    "bireme.server.app",
    "bireme.server.chat",
    "bireme.server.detokenizer",
    "bireme.server.metrics",
    "bireme.server.params",
    "bireme.server.text_state",
    "bireme.server.tokenizer",
    "bireme.cli",
]


@dataclass(frozen=True)
class Import:
    target: str
    line: int
    is_late: bool


def modules() -> dict[str, Path]:
    """Every module of the package by its name below ``bireme`` ("" is the package itself)."""
    found = {}
    for path in sorted(SOURCE.glob("bireme/**/*.py")):
        parts = path.relative_to(SOURCE / "bireme").with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports_of(name: str, path: Path, known: set[str]) -> list[Import]:
    """Every import in a file: ``bireme.x.y`` as "x.y", anything else as its top-level package."""
    found: list[Import] = []

    def add(target: str, node: ast.stmt, is_late: bool) -> None:
        inside = target == "bireme" or target.startswith("bireme.")
        found.append(Import(target if inside else target.partition(".")[0], node.lineno, is_late))

    def visit(node: ast.AST, is_late: bool) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                add(alias.name, node, is_late)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = ["bireme", *name.split(".")] if name else ["bireme"]
                if path.name != "__init__.py":
                    package = package[:-1]
                base = ".".join(package[: len(package) - node.level + 1] + ([base] if base else []))
            for alias in node.names:
                member = f"{base}.{alias.name}"
                is_module = member.startswith("bireme.") and member.removeprefix("bireme.") in known
                add(member if is_module else base, node, is_late)
        guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        inner = is_late or guarded or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for child in ast.iter_child_nodes(node):
            visit(child, inner)

    visit(ast.parse(path.read_text(encoding="utf-8")), False)
    return found


def covers(prefixes: frozenset[str] | set[str], target: str) -> bool:
    """Whether ``target`` is one of the prefixes or lies below one ("*" covers all, "" only the package itself)."""
    return "*" in prefixes or any(target == p or (p != "" and target.startswith(p + ".")) for p in prefixes)


def rule_for(name: str) -> Rule | None:
    best = [prefix for prefix in RULES if name == prefix or (prefix and name.startswith(prefix + "."))]
    return RULES[max(best, key=len)] if best else None


MODULES = modules()


def test_every_module_is_covered_by_a_rule() -> None:
    assert len(MODULES) > 10
    assert [name for name in MODULES if rule_for(name) is None] == []


@pytest.mark.parametrize("name", MODULES, ids=lambda name: name or "bireme")
def test_a_module_imports_only_what_the_table_allows(name: str) -> None:
    allowed = rule_for(name)
    assert allowed is not None
    never = {target for prefix, targets in NEVER.items() if covers({prefix}, name) for target in targets}
    wrong = []
    for found in imports_of(name, MODULES[name], set(MODULES)):
        target = found.target
        if target == "bireme" or target.startswith("bireme."):
            target = target.removeprefix("bireme").removeprefix(".")
            ok = covers(allowed.inside, target) or target == name
        else:
            ok = target not in HEAVY or target in allowed.outside
        if found.is_late:
            ok = ok or covers(allowed.late, target)
        if not ok or covers(never, target):
            wrong.append(f"line {found.line}: {found.target}{' (late)' if found.is_late else ''}")
    assert wrong == [], f"{MODULES[name].relative_to(SOURCE)} imports what its rule does not allow"


def test_the_torch_free_half_imports_where_torch_is_absent() -> None:
    script = f"""
import importlib, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton"):
            raise ImportError(f"{{name}} is absent here")
        return None

sys.meta_path.insert(0, NoTorch())
for name in {TORCH_FREE!r}:
    importlib.import_module(name)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_forbidden_import_is_noticed_at_module_level_inside_a_function_and_when_relative(tmp_path: Path) -> None:
    source = tmp_path / "scheduler.py"
    source.write_text("import torch.nn\n\ndef f():\n    from bireme import executor\n    from . import plan\n")
    found = imports_of("scheduler.scheduler", source, {"executor", "scheduler.plan"})
    assert found == [
        Import("torch", 1, False),
        Import("bireme.executor", 4, True),
        Import("bireme.scheduler.plan", 5, True),
    ]


def test_help_is_printed_without_loading_torch_or_the_server() -> None:
    script = """
import sys
from bireme.cli import app
from typer.testing import CliRunner
done = CliRunner().invoke(app, ["serve", "--help"])
assert done.exit_code == 0, done.output
heavy = {"torch", "fastapi", "uvicorn", "transformers", "tokenizers"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
