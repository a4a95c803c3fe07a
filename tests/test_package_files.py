"""What the wheel holds beside code: the page's files above all, without which a server has a blank page."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "bireme"


def data_files() -> set[str]:
    """Every file of the package that is no code, as git knows it."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src/bireme"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("this is no git checkout")
    return {line.removeprefix("src/") for line in listed.stdout.splitlines() if not line.endswith(".py")}


def test_nothing_keeps_a_file_of_the_package_out_of_the_wheel() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    # Hatch takes a package whole, but for what these could leave out and what git ignores.
    assert build == {"targets": {"wheel": {"packages": ["src/bireme"]}}}
    data = data_files()
    there = {
        str(path.relative_to(ROOT / "src"))
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc", ".pyi")
    }
    assert there - data == set(), "git ignores them, so the wheel lacks them"
    assert {"bireme/server/static/index.html", "bireme/pocket/model/tokenizer.json"} <= data


def test_the_wheels_own_builder_lists_the_pages_files() -> None:
    builder = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")
    listed = {
        entry.distribution_path
        for entry in builder.WheelBuilder(str(ROOT)).recurse_included_files()
        if not entry.distribution_path.endswith(".py")
    }
    assert listed >= data_files()


def test_the_page_asks_for_no_file_that_the_installed_package_lacks() -> None:
    static = files("bireme.server").joinpath("static")
    texts = {each.name: each.read_text(encoding="utf-8") for each in static.iterdir()}
    assert {name.rpartition(".")[2] for name in texts} == {"html", "css", "js", "svg"}
    wanted = set(re.findall(r'(?:src|href)="static/([^"]+)"', texts["index.html"]))
    for name, text in texts.items():
        if name.endswith(".js"):
            wanted |= set(re.findall(r'from "\./([^"]+)"', text))
    assert {"page.js", "page.css", "api.js", "live.js"} <= wanted
    assert wanted | {"index.html"} == set(texts), "a file is missing, or nobody asks for it"
