"""The `roll` command. What takes time to import is imported by the command that needs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roll import __version__
from roll.exceptions import ConfigError, DataError, MissingDependencyError, RollError, WorkerError

if TYPE_CHECKING:
    from roll.configs.report import CheckReport

INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended

app = typer.Typer(
    name="roll",
    help="Train language models by reinforcement and from preferences.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich help pages take longer to import than to read
)

ConfigPath = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="A YAML file.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Values that replace those of the file.", show_default=False
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"roll {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Train language models by reinforcement and from preferences."""


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Train as a config file says. Ctrl-C finishes the step, saves and says how to go on.

    \b
    roll train examples/rlvr/reverse_grpo.yaml
    roll train config.yaml max_steps=100 actor_train.training_args.learning_rate=1e-5
    roll train config.yaml resume_from_checkpoint=true
    """
    from roll.pipeline.preflight import examine

    checked = examine(config, overrides or ())
    loaded = checked.require()
    for sentence in checked.warnings:
        typer.echo(f"warning: {sentence}", err=True)
    from transformers.utils.logging import disable_progress_bar

    from roll.pipeline.registry import pipeline_class
    from roll.utils.machine import given_processors, limit_threads

    limit_threads(given_processors())  # torch knows nothing of quotas
    disable_progress_bar()  # a bar for every file that is read or written would tear ours apart
    try:
        with pipeline_class(loaded.config)(
            loaded.config, progress=False if quiet else None
        ) as pipeline:
            pipeline.run()
    except KeyboardInterrupt:
        typer.echo("Stopped.", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if pipeline.is_interrupted:
        raise typer.Exit(INTERRUPTED)


@app.command()
def check(
    config: ConfigPath,
    overrides: Overrides = None,
    machine: Annotated[
        str | None,
        typer.Option(
            help="Compare with another machine: 8xH200, 2x8xH200, 1xA100-80GB, cpu-64GB.",
            show_default="this one",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print findings, numbers and config as JSON.")
    ] = False,
) -> None:
    """Do all of `roll train` that comes before a model is loaded.

    Looks at config, files, data, devices, packages and memory.
    Prints every error at once (exit code 2), or the batch arithmetic and the memory it needs.

    \b
    roll check config.yaml
    roll check config.yaml --machine 8xH200
    roll check config.yaml rollout_batch_size=64 --json
    """
    from roll.configs.report import check_report
    from roll.pipeline.preflight import Checked, examine
    from roll.utils.machine import parse_machine

    other = None if machine is None else parse_machine(machine)
    try:
        checked = examine(config, overrides or (), other)
    except ConfigError as error:  # there are no values to look at
        if not as_json:
            raise
        checked = Checked(config, None, str(error).splitlines())
    if as_json and checked.errors:
        found = {"errors": checked.errors, "warnings": checked.warnings, "notes": checked.notes}
        typer.echo(json.dumps({"path": str(config), "valid": False, **found}, indent=2))
        raise typer.Exit(2)
    report = check_report(checked.require(), checked.memory, checked.warnings, checked.notes)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        _print_report(report)


def _print_report(report: CheckReport) -> None:
    config = report.loaded.config
    where = "on Ray" if config.execution_backend == "ray" else "in this process"
    typer.echo(
        f"{report.loaded.path}: a valid config for the {report.pipeline} pipeline, "
        f"which runs {where}\n"
    )
    lines = [["", *report.roles], *([label, *cells] for label, cells in report.rows)]
    if sys.stdout.isatty():
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        table = Table(*lines[0], box=SIMPLE_HEAD)
        for line in lines[1:]:
            table.add_row(*line)
        Console().print(table)
    else:
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
            typer.echo("  ".join([line[0].ljust(widths[0]), *cells[1:]]))
    if report.memory:
        needs = "; ".join(f"{name} {estimate}" for name, estimate in report.memory.items())
        typer.echo(f"\nmemory on each device, estimated: {needs}")
    for sentence in report.warnings:
        typer.echo(f"\nwarning: {sentence}")
    for remark in report.remarks:
        typer.echo(f"\nnote: {remark}")


@app.command(name="eval")
def evaluate(
    config: ConfigPath,
    overrides: Overrides = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="A run, a checkpoint of one, or a model folder.", show_default="the config's model"
        ),
    ] = None,
    samples_to: Annotated[Path | None, typer.Option(help="Folder that gets every sample.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON.")] = False,
) -> None:
    """Run the validation of a config, with the weights of any checkpoint.

    \b
    roll eval examples/rlvr/reverse_grpo.yaml --checkpoint output/reverse_grpo
    """
    from roll.pipeline.registry import evaluation, load_config

    loaded = load_config(config, overrides or (), warn=False)
    metrics = evaluation(loaded.config)(loaded.config, checkpoint, samples_to=samples_to)
    if as_json:
        typer.echo(json.dumps(metrics, indent=2))
        return
    width = max(map(len, metrics), default=0)
    for name, value in sorted(metrics.items()):
        typer.echo(f"{name:{width}}  {value:.6g}")


@app.command()
def view(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.", show_default=False)
    ],
    live: Annotated[bool, typer.Option(help="Serve the report and follow the run.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Where to write the page.", show_default="in the run")
    ] = None,
    port: Annotated[int, typer.Option(help="Port of --live.", show_default="any")] = 0,
    host: Annotated[
        str, typer.Option(help="Address of --live; others can then read the run.")
    ] = "127.0.0.1",
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser.")] = True,
) -> None:
    """Write the report of a run and open it: curves, health, and every sample down to its tokens.

    \b
    roll view output/reverse_grpo
    roll view output/reverse_grpo output/reverse_ppo      two runs in one page
    roll view --live output/reverse_grpo                  while it runs
    """
    from roll.viewer import view as show

    try:
        page = show(runs, live=live, port=port, open_browser=open_browser, out=out, host=host)
    except (FileNotFoundError, ValueError) as error:
        raise DataError(str(error)) from None
    if page is not None:
        typer.echo(page)


@app.command(name="env-check")
def env_check(
    env_id: Annotated[
        str, typer.Argument(metavar="ID", help="An id, a dotted path, or gymnasium:ID.")
    ],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Arguments of the environment.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds to play.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Play an environment with random and malformed actions, and say what is wrong with it.

    Exit code 1 if anything is.

    \b
    roll env-check frozen_lake size=4
    roll env-check my_package.my_env:MyEnv --seeds 100
    """
    from dataclasses import asdict

    from roll.configs.load import parse_overrides
    from roll.pipeline.agentic.env.env_check import check_env

    report = check_env(env_id, parse_overrides(options or ()), range(seeds))
    typer.echo(json.dumps({**asdict(report), "ok": report.ok}, indent=2) if as_json else report)
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def new(
    project: Annotated[
        Path, typer.Argument(metavar="PROJECT", help="A folder to make.", show_default=False)
    ],
) -> None:
    """Make a project that trains as it is: configs, a reward function, data and a tiny model.

    \b
    roll new my_project
    """
    from roll.commands.new_project import new_project

    folder = new_project(project)
    command = "roll train warm_start.yaml && roll train grpo.yaml"
    typer.echo(f"{folder} is ready. Next:\n\n  cd {folder}\n  {command}")


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look at Python, packages, GPUs, memory and disk, and say how to mend what is wrong.

    Exit code 1 if anything keeps a run from starting.
    """
    from dataclasses import asdict

    from roll.commands.doctor import examine

    findings = examine()
    is_healthy = all(item.state != "problem" for item in findings)
    if as_json:
        found = [asdict(item) for item in findings]
        typer.echo(json.dumps({"healthy": is_healthy, "findings": found}, indent=2))
    else:
        marks = {"ok": "ok", "optional": "-", "warning": "!", "problem": "PROBLEM"}
        width = max(len(item.what) for item in findings)
        for item in findings:
            typer.echo(f"{marks[item.state]:>7}  {item.what:{width}}  {item.found}")
            if item.fix:
                typer.echo(f"{'':7}  {'':{width}}  -> {item.fix}")
    if not is_healthy:
        raise typer.Exit(1)


@app.command()
def demo(
    everything: Annotated[
        bool, typer.Option("--all", help="Also a short agentic and a short DPO run.")
    ] = False,
    folder: Annotated[Path, typer.Option(help="Where to write.")] = Path("output/demo"),
) -> None:
    """Watch a tiny model learn on this machine, from nothing, in minutes. No GPU, no download.

    \b
    roll demo
    roll demo --all
    """
    from roll.commands.demo import run_demo

    try:
        run_demo(folder, everything=everything)
    except KeyboardInterrupt:
        typer.echo("Stopped.", err=True)
        raise typer.Exit(INTERRUPTED) from None


def main() -> None:
    """Entry point of the console script. Errors that users can correct end with exit code 2."""
    try:
        app(prog_name="roll")
    except RollError as error:
        cause = error.__cause__
        # What a worker was given, or lacks, is the user's to correct: where it noticed is not.
        if isinstance(error, WorkerError) and isinstance(
            cause, ConfigError | DataError | MissingDependencyError
        ):
            error = cause
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
