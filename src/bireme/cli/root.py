"""The command line as a whole: its commands, ``--version``, and how a usage error ends."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from bireme import __version__
from bireme.cli import bench, chat, evaluate, generate, serve
from bireme.cli.config_file import ConfigurableCommand
from bireme.cli.presentation import UsageError, value_at_fault
from bireme.openmp import limit_spinning

app = typer.Typer(
    name="bireme",
    help="Serve Qwen3.5-family models: every rank runs one batched forward per step over all ready rows.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.command(cls=ConfigurableCommand)(serve.serve)
app.command()(chat.chat)
app.command()(generate.generate)
app.add_typer(bench.bench_app)
app.add_typer(evaluate.eval_app)


def main() -> None:
    """Run the command line: a usage error is one line on stderr, like the package's own errors."""
    limit_spinning()
    try:
        code = app(standalone_mode=False)
    except UsageError as error:
        message: str = error.format_message()  # type: ignore[attr-defined]
        if type(error).__name__ != "NoArgsIsHelpError":
            message = f"bireme: error: {' '.join(message.split())}{value_at_fault(error, message)}"
        typer.echo(message, err=True)
        code = 2
    except (typer.Abort, KeyboardInterrupt):
        typer.echo("bireme: interrupted", err=True)
        code = 130
    sys.exit(code)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bireme {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass
