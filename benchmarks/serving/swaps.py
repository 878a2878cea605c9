"""What swaps of a tail do to another: its latency while bundles are loaded, warmed and unloaded beside it."""

from __future__ import annotations

import shutil
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.serving.figures import Figures
from benchmarks.serving.layouts import Layout
from benchmarks.serving.load import Load
from benchmarks.serving.measuring import measure
from benchmarks.serving.systems import START_S, Running, Setting, splitfleet
from edge_sdk.bundle import Bundle
from edge_sdk.channel import Channel
from edge_sdk.manifest import MANIFEST_FILE
from edge_sdk.protocol import LoadTail, UnloadTail
from edge_sdk.repository_client import RepositoryClient


@dataclass(frozen=True, kw_only=True)
class SwapRound:
    """Of one round: a tail alone, then the same beside ``swaps`` swaps, one after another without a pause."""

    without: Figures
    beside: Figures
    swaps: int


def measure_swaps(setting: Setting, layout: Layout, seconds: float, rounds: int, clients: int) -> list[SwapRound]:
    """A tail that ``clients`` ask in closed loops; in each round once alone and once beside swaps of another."""
    found = []
    with splitfleet(setting) as running:
        load = Load(
            target=running.target,
            features=setting.tail.features,
            expected=setting.tail.expected,
            tolerance=setting.tail.tolerance,
            clients=clients,
            seconds=seconds,
            cores=layout.clients,
        )
        for number in range(rounds):
            print(f"swaps: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
            without = measure(running.processes, load)
            with _swapping(running, setting, f"round{number}") as done:
                beside = measure(running.processes, load)
            found.append(SwapRound(without=without, beside=beside, swaps=len(done)))
    return found


@contextmanager
def _swapping(running: Running, setting: Setting, name: str) -> Iterator[list[str]]:
    """Swap as long as the context lasts; gives the digests that were served, and raises what went wrong."""
    done: list[str] = []
    failures: list[Exception] = []
    enough = threading.Event()

    def swap() -> None:
        old: str | None = None
        with Channel(running.target.endpoint, connect_timeout_s=START_S) as channel:
            while not enough.is_set():
                twin = _twin(setting.tail.bundle, setting.work / "twins", f"{name}-{len(done)}")
                RepositoryClient(channel).put_bundle(twin)
                channel.call(LoadTail(bundle=twin.digest), timeout_s=START_S)
                if old is not None:
                    channel.call(UnloadTail(bundle=old), timeout_s=START_S)
                old = twin.digest
                done.append(old)
            if old is not None:
                channel.call(UnloadTail(bundle=old), timeout_s=START_S)

    def run() -> None:
        try:
            swap()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield done
    finally:
        enough.set()
        thread.join()
    if failures:
        raise failures[0]


def _twin(bundle: Bundle, folder: Path, name: str) -> Bundle:
    """The same files under another digest."""
    copy = folder / name
    shutil.copytree(bundle.path, copy)
    manifest = replace(bundle.manifest, model=replace(bundle.manifest.model, name=name))
    (copy / MANIFEST_FILE).write_bytes(manifest.canonical())
    return Bundle.open(copy)


def show_swaps(rounds: list[SwapRound]) -> None:
    """The medians of rounds."""

    def middle(of: Callable[[SwapRound], float]) -> float:
        return statistics.median(map(of, rounds))

    lines = {"swaps in all": str(sum(each.swaps for each in rounds))}
    for name in ("p50_ms", "p99_ms"):
        alone = middle(lambda each, name=name: getattr(each.without, name) or 0.0)
        beside = middle(lambda each, name=name: getattr(each.beside, name) or 0.0)
        ratio = middle(
            lambda each, name=name: (getattr(each.beside, name) or 0.0) / (getattr(each.without, name) or 1.0)
        )
        lines[f"{name[:3]} of the other tail, alone and beside"] = f"{alone:.2f} ms, {beside:.2f} ms: × {ratio:.2f}"
    lines["errors"] = str(sum(sum(part.errors.values()) for each in rounds for part in (each.without, each.beside)))
    print("\nswaps of one tail beside another")
    for name, value in lines.items():
        print(f"{name:40}{value}")


def swaps_document(rounds: list[SwapRound]) -> dict[str, Any]:
    """For the JSON file."""
    return {"rounds": [asdict(each) for each in rounds]}
