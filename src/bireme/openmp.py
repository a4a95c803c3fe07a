"""How torch's CPU threads wait for each other."""

from __future__ import annotations

import os

SPINS = 3000


def limit_spinning() -> None:
    """Let OpenMP threads sleep after a short spin, unless the user chose how they wait. Call before torch is loaded.

    GNU OpenMP spins for about 15 ms by default before a thread gives its core away. When anything else runs on the
    cores (a server, a client), the threads then wait for each other's turns: decode steps of a tiny model on two busy
    cores took 34 ms with this bound and over 200 ms without. Idle cores showed no difference.
    """
    if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
