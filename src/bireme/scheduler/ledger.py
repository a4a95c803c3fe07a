"""Every request ends in exactly one terminal event: the one object that enforces it."""

from __future__ import annotations

from collections.abc import Iterable

from bireme.types import RequestOutput


class LedgerError(RuntimeError):
    """The engine broke its promise about terminal events: a defect of the engine, never of a request."""


class Ledger:
    """Which requests are open, from the moment they arrive until their terminal output."""

    def __init__(self) -> None:
        self._open: dict[str, None] = {}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._open

    @property
    def open_ids(self) -> list[str]:
        """The open requests, in order of arrival."""
        return list(self._open)

    def open(self, request_id: str) -> None:
        """A request arrived.

        Raises:
            LedgerError: it is open already.
        """
        if request_id in self._open:
            raise LedgerError(f"request {request_id!r} was opened twice")
        self._open[request_id] = None

    def record(self, outputs: Iterable[RequestOutput]) -> None:
        """Outputs are about to leave; the ones with a finish reason close their requests.

        Raises:
            LedgerError: an output of a request that is not open, so that it would follow its terminal one.
        """
        for output in outputs:
            if output.request_id not in self._open:
                raise LedgerError(f"request {output.request_id!r} has an output after its end")
            if output.finish_reason is not None:
                del self._open[output.request_id]

    def assert_settled(self) -> None:
        """Raise LedgerError if a request is still without its terminal output."""
        if self._open:
            raise LedgerError(f"{len(self._open)} requests never ended, the first is {next(iter(self._open))!r}")
