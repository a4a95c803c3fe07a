"""The ``bireme`` command. One module for each command; anything heavy is imported inside the command that needs it."""

from bireme.cli.root import app, main

__all__ = ["app", "main"]
