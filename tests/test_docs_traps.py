"""docs/traps.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
NAMED = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (TESTS.parent / "docs" / "traps.md").read_text(encoding="utf-8"))


def test_the_page_names_tests() -> None:
    assert len(NAMED) > 40


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED)))
def test_a_named_test_exists(file: str, name: str) -> None:
    assert re.search(rf"^def {name}\(", (TESTS / file).read_text(encoding="utf-8"), re.MULTILINE)
