"""docs/cli.md says what the code says. ``python tests/test_cli_docs.py`` writes its tables anew."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from bireme.cli import app

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
BEGIN, END = "<!-- options: from the code -->\n", "<!-- end of options -->\n"


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every command that runs something, with its whole name."""
    below = getattr(command, "commands", None)
    if below is None:
        yield name, command
        return
    for part, each in below.items():
        yield from commands(each, f"{name} {part}")


def rendered() -> str:
    """A section for each command: what it does, and a table of its arguments and options."""
    sections = []
    for name, command in commands(typer.main.get_command(app), "bireme"):
        about = command.help.strip().partition("\n\n")[0].replace("\n", " ")
        rows = ["| option | what it does | default |", "| --- | --- | --- |"]
        for param in command.params:
            if param.name == "help":
                continue
            names = [param.metavar] if param.param_type_name == "argument" else [*param.opts, *param.secondary_opts]
            takes = "" if param.param_type_name == "argument" or not param.metavar else f" {param.metavar}"
            value = getattr(param.default, "value", param.default)
            default = "" if value is None or value is False or value == "" else f"`{value}`"
            text = (param.help or "").replace("|", "\\|")
            rows.append(f"| `{', '.join(names)}{takes}` | {text} | {default} |")
        sections.append(f"## {name}\n\n{about}\n\n" + "\n".join(rows) + "\n")
    return "\n".join(sections)


def parts() -> tuple[str, str, str]:
    """The page before, between and after its marks."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    between, _, after = rest.partition(END)
    return before, between, after


def test_the_tables_are_those_of_the_code() -> None:
    assert parts()[1] == rendered(), "run python tests/test_cli_docs.py"


def test_every_flag_in_the_text_exists() -> None:
    flags = {
        flag
        for _, command in commands(typer.main.get_command(app), "bireme")
        for param in command.params
        for flag in [*param.opts, *param.secondary_opts]
    }
    before, _, after = parts()
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", before + after))
    assert used - flags - {"--help"} == set()


def test_every_key_of_the_example_file_is_an_option_of_serve() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", parts()[0], re.DOTALL)
    serve = dict(commands(typer.main.get_command(app), "bireme"))["bireme serve"]
    known = {flag[2:] for param in serve.params for flag in param.opts} | {"model"}
    keys = re.findall(r"^([a-z-]+):", example, re.MULTILINE)
    assert keys
    assert set(keys) <= known | {param.name for param in serve.params}


if __name__ == "__main__":
    before, _, after = parts()
    PAGE.write_text(before + BEGIN + rendered() + END + after, encoding="utf-8")
