"""What a person sees when something is wrong, and figures made readable."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

import typer

from bireme.errors import BiremeError, ConfigError, InvalidRequestError

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Typer's base of all that is wrong with a command line (it may bring a click of its own)."""


def value_at_fault(error: Exception, message: str) -> str:
    """What was given, where the message of Typer's own check does not say."""
    errors = getattr(error.__cause__, "errors", None)
    value = repr(errors()[0]["input"]) if errors else ""
    return f" (it is {value})" if value and value not in message else ""


def take_interrupts() -> None:
    """From here on there is something to clean up: Ctrl-C becomes KeyboardInterrupt, where it ended the process."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def clean_errors() -> Iterator[None]:
    """Turn the package's own errors into one line on stderr and an exit code, and Ctrl-C into a quiet 130.

    2: a flag, configuration or request that cannot be run; 1: something failed. Other exceptions are bugs and pass.
    """
    try:
        yield
    except BiremeError as error:
        message = " ".join(str(error).split())
        typer.echo(f"bireme: error: {message}", err=True)
        raise typer.Exit(2 if isinstance(error, (ConfigError, InvalidRequestError)) else 1) from None
    except KeyboardInterrupt:
        typer.echo("bireme: interrupted", err=True)
        raise typer.Exit(130) from None


def write(text: str) -> None:
    """Write to stdout at once."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer would fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise BiremeError(f"cannot write to stdout: {error.strerror or error}") from error


def size(num_bytes: int) -> str:
    """Bytes for a person: three digits and a binary unit."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1000 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.3g} {units[0]}"
