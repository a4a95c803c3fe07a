"""A progress bar for long loads, on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHOW_AFTER_SECONDS = 1.0
Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), or with counts of other things."""


@contextmanager
def progress_bar(description: str, *, enabled: bool, counts: bool = False) -> Iterator[Progress]:
    """Give a callback for (done, in all) that draws a bar once the work has taken over a second.

    Quick loads print nothing. The bar stays on the screen when the block ends, also by an error. It shows bytes and
    their rate, or with ``counts`` plain numbers.
    """
    if not enabled:
        yield lambda done, total: None
        return

    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as RichProgress

    bar = RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        *([MofNCompleteColumn()] if counts else [DownloadColumn(binary_units=True), TransferSpeedColumn()]),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    task = bar.add_task(description, total=None)
    started = time.monotonic()

    def advance(done: int, total: int) -> None:
        if not bar.live.is_started and time.monotonic() - started > SHOW_AFTER_SECONDS:
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()
