"""The `roll` command: parse, load, run. Whatever takes time to import is imported by the command that needs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roll import __version__
from roll.exceptions import ConfigError, DataError, MissingDependencyError, RollError, WorkerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll.configs.loader import LoadedConfig
    from roll.configs.report import CheckReport

INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended

app = typer.Typer(
    name="roll",
    help="Train language models by reinforcement and from preferences.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich help pages take longer to import than to read
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values that replace those of the file.", show_default=False),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"roll {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train language models by reinforcement and from preferences."""


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Train as a config file says. Ctrl-C finishes the step, saves and says how to go on."""
    loaded = _load_for_training(config, overrides or ())
    for sentence in loaded.warnings():
        typer.echo(f"warning: {sentence}", err=True)
    from transformers.utils.logging import disable_progress_bar

    from roll.pipeline.registry import pipeline_class

    disable_progress_bar()  # a bar for every file that is read or written would tear ours apart
    try:
        with pipeline_class(loaded.config)(loaded.config, progress=False if quiet else None) as pipeline:
            pipeline.run()
    except KeyboardInterrupt:
        typer.echo("Stopped.", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if pipeline.is_interrupted:
        raise typer.Exit(INTERRUPTED)


def _load_for_training(config: Path, overrides: Sequence[str]) -> LoadedConfig:
    """A config that has all that a run needs."""
    from roll.pipeline.registry import load_config

    loaded = load_config(config, overrides, warn=False)
    missing = loaded.config.missing_for_training()
    if missing:
        raise ConfigError("\n".join(f"{config}: {problem}" for problem in missing))
    return loaded


@app.command()
def check(
    config: ConfigPath,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print numbers and resolved config as JSON.")] = False,
) -> None:
    """Validate a config file and print its batch arithmetic. Needs no GPU and loads no model."""
    from roll.configs.report import check_report

    report = check_report(_load_for_training(config, overrides or ()))
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        _print_report(report)


def _print_report(report: CheckReport) -> None:
    config = report.loaded.config
    where = "on Ray" if config.execution_backend == "ray" else "in this process"
    typer.echo(f"{report.loaded.path}: a valid config for the {report.pipeline} pipeline, which runs {where}\n")
    _print_table(report)
    for sentence in report.loaded.warnings():
        typer.echo(f"\nwarning: {sentence}")
    for remark in report.remarks:
        typer.echo(f"\nnote: {remark}")


def _print_table(report: CheckReport) -> None:
    header = ["", *report.roles]
    lines = [[label, *cells] for label, cells in report.rows]
    if sys.stdout.isatty():
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        table = Table(*header, box=SIMPLE_HEAD)
        for line in lines:
            table.add_row(*line)
        Console().print(table)
        return
    widths = [max(len(line[column]) for line in [header, *lines]) for column in range(len(header))]
    for line in [header, *lines]:
        cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        typer.echo("  ".join([line[0].ljust(widths[0]), *cells]))


def main() -> None:
    """Entry point of the console script. Errors that users can correct end with their message and exit code 2."""
    try:
        app(prog_name="roll")
    except RollError as error:
        cause = error.__cause__
        # What a worker was given, or lacks, is the user's to correct: where the worker noticed it is not.
        if isinstance(error, WorkerError) and isinstance(cause, ConfigError | DataError | MissingDependencyError):
            error = cause
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
