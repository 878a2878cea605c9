"""`splitfleet zoo`: list the models of a task, and train them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cloud_server.cli.output import json_option

if TYPE_CHECKING:
    from zoo_keras.info import ModelInfo
    from zoo_keras.training import EpochReport


@click.group()
def zoo() -> None:
    """The trained models of each task, and how to train them anew."""


@zoo.command("list")
@json_option
def list_models(as_json: bool) -> None:
    """List the models of every task with size and accuracy."""
    from dataclasses import asdict

    import zoo_keras
    from cloud_server.cli.output import Group, grouped_table, print_json, stdout
    from zoo_keras.training import is_trained

    infos = [
        zoo_keras.model_info(task_name, model_name)
        for task_name in zoo_keras.tasks()
        for model_name in zoo_keras.task(task_name).models
        if is_trained(task_name, model_name)
    ]
    if as_json:
        print_json({"models": [asdict(info) for info in infos]})
        return
    groups = (
        Group(("model", "family"), text=True),
        Group(("task",)),
        *(Group((figure,), right=True) for figure in ("parameters", "weights kB", "accuracy")),
    )
    rows = [
        (
            (info.name, info.family),
            (info.task,),
            (f"{info.parameters:,}",),
            (f"{info.weights_bytes / 1000:,.0f}",),
            (f"{info.float_accuracy:.4f}",),
        )
        for info in infos
    ]
    console = stdout()
    console.print(grouped_table(groups, rows, width=console.width))


@zoo.command()
@click.option("--task", "task_name", default="fashion-mnist", show_default=True, help="The task to train for.")
@click.option("--model", "models", multiple=True, help="A model to train; may be repeated. Default: all of the task.")
@click.option("--epochs", type=click.IntRange(min=1), help="Train for so many epochs, not for the model's own number.")
@click.option("--force", is_flag=True, help="Train models that are trained already, and replace their weights.")
@click.option("--background", is_flag=True, help="Go on in the background; the log is in the work directory.")
@click.option(
    "--work-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the state of an unfinished training is kept.  [default: splitfleet/zoo in the user's cache directory]",
)
def train(
    task_name: str, models: tuple[str, ...], epochs: int | None, force: bool, background: bool, work_dir: Path | None
) -> None:
    """Train models on the full data set; an interrupted training goes on where it was."""
    import zoo_keras
    from edge_sdk.errors import ConfigError
    from zoo_keras.training import is_trained, is_unfinished

    known = zoo_keras.task(task_name).models
    unknown = [name for name in models if name not in known]
    if unknown:
        raise ConfigError(f"the task {task_name!r} has no model {unknown[0]!r}; it has: {', '.join(known)}")
    work_dir = work_dir or _cache_directory() / "zoo"
    wanted = []
    for name in models or known:
        unfinished = is_unfinished(task_name, name, work_directory=work_dir)
        if is_trained(task_name, name) and not force and not unfinished:
            click.echo(f"{name}: trained already (--force trains it again)", err=True)
        else:
            wanted.append(name)
    if not wanted:
        return
    if background:
        _start_in_background(task_name, wanted, epochs, work_dir)
        return

    from zoo_keras import training
    from zoo_keras.data import load_full
    from zoo_keras.samples import SPLITS, ship_samples
    from zoo_keras.tasks import ASSETS

    full = load_full()
    assets = ASSETS / task_name
    if not all((assets / f"{split}.npz").exists() for split in SPLITS):
        ship_samples(full, assets)
    with _observer() as observer:
        for name in wanted:
            training.train(task_name, name, full, work_directory=work_dir, observer=observer, epochs=epochs)


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "splitfleet"


def _start_in_background(task_name: str, models: list[str], epochs: int | None, work_dir: Path) -> None:
    command = [sys.executable, "-c", "from cloud_server.cli import main; main()", "zoo", "train"]
    command += ["--task", task_name, "--force", "--work-dir", str(work_dir)]
    for name in models:
        command += ["--model", name]
    if epochs is not None:
        command += ["--epochs", str(epochs)]
    work_dir.mkdir(parents=True, exist_ok=True)
    log_path = work_dir / "train.log"
    with log_path.open("ab") as log:
        # A session of its own: it outlives the terminal it was started from.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    click.echo(f"training {', '.join(models)} as process {process.pid}; its log is {log_path}", err=True)


def _observer() -> Any:
    """What shows the progress on stderr: a bar in a terminal, one line per epoch elsewhere."""
    from contextlib import nullcontext

    from rich.console import Console

    console = Console(stderr=True)
    return _Bar(console) if console.is_terminal else nullcontext(_Lines())


class _Lines:
    """One plain line per event."""

    def model_started(self, name: str, *, epochs: int, epochs_done: int) -> None:
        """Say whether the training begins or goes on."""
        before = f", going on after epoch {epochs_done}" if epochs_done else ""
        click.echo(f"{name}: {epochs} epochs{before}", err=True)

    def batch_done(self, name: str, *, epoch: int, fraction: float) -> None:
        """Too fine for lines."""

    def epoch_done(self, name: str, *, epoch: int, report: EpochReport) -> None:
        """Print the figures of the epoch."""
        click.echo(
            f"{name}: epoch {epoch}: loss {report.loss:.4f}, accuracy on the training images {report.accuracy:.4f}, "
            f"{report.seconds:.0f} s",
            err=True,
        )

    def model_finished(self, info: ModelInfo) -> None:
        """Print what came out."""
        click.echo(
            f"{info.name}: accuracy {info.float_accuracy:.4f} on {info.test_images} test images, "
            f"{info.parameters:,} parameters, {info.weights_bytes:,} bytes",
            err=True,
        )


class _Bar(_Lines):
    """A progress bar for the model in training, beneath the lines."""

    def __init__(self, console: Any) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=console, transient=True
        )
        self._bar = self._progress.add_task("", total=None)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def model_started(self, name: str, *, epochs: int, epochs_done: int) -> None:
        """Reset the bar."""
        super().model_started(name, epochs=epochs, epochs_done=epochs_done)
        self._progress.reset(self._bar, total=epochs, completed=epochs_done, description=name)

    def batch_done(self, name: str, *, epoch: int, fraction: float) -> None:
        """Move the bar."""
        self._progress.update(self._bar, completed=epoch - 1 + fraction, description=f"{name}, epoch {epoch}")
