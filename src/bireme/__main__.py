"""The ``bireme`` command, also as ``python -m bireme``. Ctrl-C is heard before anything that takes time is imported."""

from __future__ import annotations

import os
import signal
from types import FrameType


def leave(signum: int, frame: FrameType | None) -> None:
    """Ctrl-C while starting: there is nothing to clean up, and an exception could be lost inside an import."""
    os.write(2, b"bireme: interrupted\n")
    os._exit(130)


def main() -> None:
    """Entry point of the ``bireme`` script."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
    from bireme.cli import main as run

    run()


if __name__ == "__main__":
    main()
