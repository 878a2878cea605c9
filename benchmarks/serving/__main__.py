"""The command: see :mod:`benchmarks.serving`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import benchmarks.serving
from benchmarks.peers.make_venvs import PEERS, default_folder, python_of
from benchmarks.serving import report, tails
from benchmarks.serving.comparison import BARE, CEILING, ECHO, Comparison, Plan
from benchmarks.serving.idle import idle_document, measure_idle, show_idle
from benchmarks.serving.layouts import LAYOUTS, layout
from benchmarks.serving.swaps import measure_swaps, show_swaps, swaps_document
from benchmarks.serving.systems import SYSTEMS, Setting

FRACTIONS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
_CHOICES = (CEILING, *SYSTEMS)


def main() -> None:
    """Print the tables; write the figures where asked."""
    options = _options()
    # Else what is stopped while another is measured would be left behind for ever.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    settings = {name: getattr(options, name) for name in ("seconds", "rounds", "max_batch", "batch_delay_ms")}
    document: dict[str, Any] = {"machine": report.machine(), "settings": settings}
    with tempfile.TemporaryDirectory() as work:
        if options.idle is not None:
            _idle(options, Path(work), document)
        elif options.swaps:
            _swaps(options, Path(work), document)
        else:
            _compare(options, Path(work), document)
    _write(options.json, document)


def _compare(options: argparse.Namespace, work: Path, document: dict[str, Any]) -> None:
    cache = default_folder()
    plan = Plan(
        systems=_systems(options, cache),
        clients=options.clients,
        seconds=options.seconds,
        rounds=options.rounds,
        max_batch=options.max_batch,
        delay_ms=options.batch_delay_ms,
        open_loop=FRACTIONS if options.open_loop else (),
        cache=cache,
        work=work,
    )
    document["comparisons"] = []
    for name in options.tails:
        tail = tails.make(name, cache)
        for place in options.layouts:
            results = Comparison(tail, layout(place), plan).run()
            report.show(f"tail {name}, layout {place}", results)
            document["comparisons"].append({"tail": name, "layout": place, **report.as_document(results)})
            # A run that is interrupted leaves what it found.
            _write(options.json, document)


def _setting(options: argparse.Namespace, work: Path) -> Setting:
    cache = default_folder()
    return Setting(
        tail=tails.make(options.tails[0], cache),
        cores=layout(options.layouts[0]).server,
        max_batch=options.max_batch,
        delay_ms=options.batch_delay_ms,
        cache=cache,
        work=work,
    )


def _swaps(options: argparse.Namespace, work: Path, document: dict[str, Any]) -> None:
    place = layout(options.layouts[0])
    rounds = measure_swaps(_setting(options, work), place, options.seconds, options.rounds, options.clients[0])
    show_swaps(rounds)
    document["swaps"] = swaps_document(rounds)


def _idle(options: argparse.Namespace, work: Path, document: dict[str, Any]) -> None:
    place = layout(options.layouts[0])
    rounds = measure_idle(_setting(options, work), place, options.idle, options.seconds, options.rounds)
    show_idle(options.idle, rounds)
    document["idle"] = idle_document(options.idle, rounds)


def _write(path: Path | None, document: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=2) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=(benchmarks.serving.__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--tails", type=_some(tails.TAILS), default=["tiny"], help=f"of {', '.join(tails.TAILS)}")
    parser.add_argument(
        "--systems", type=_some(_CHOICES), help=f"of {', '.join(_CHOICES)}; if none is named, all that are here"
    )
    parser.add_argument("--layouts", type=_some(LAYOUTS), default=["apart"], help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument("--clients", type=_counts, default=[1, 4, 8], help="how many at once, one after another")
    parser.add_argument("--seconds", type=float, default=1.5, help="of one turn of one system")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--max-batch",
        type=int,
        help="of all systems; if it is not named, as large as there are clients at most, which suits the peers best",
    )
    parser.add_argument("--batch-delay-ms", type=float, default=2.0)
    parser.add_argument("--open-loop", action="store_true", help="also with requests at random times")
    parser.add_argument(
        "--echo", action="store_true", help="also what a lone request takes beyond echo and computation"
    )
    parser.add_argument("--curve", action="store_true", help="also splitfleet with CURVE")
    parser.add_argument(
        "--idle", type=int, metavar="N", help="instead of all that: N idle devices beside an active one"
    )
    parser.add_argument("--swaps", action="store_true", help="instead of all that: a tail beside swaps of another")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    if options.max_batch is None:
        options.max_batch = max(options.clients)
    return options


def _some(choices: Any) -> Any:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in choices]:
            raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}; there are {', '.join(choices)}")
        return names

    return parse


def _counts(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def _systems(options: argparse.Namespace, cache: Path) -> list[str]:
    """Those named, else all but the special ones whose environments are there."""
    names: list[str] = options.systems or [CEILING, BARE, "splitfleet", "splitfleet-auto", *PEERS]
    if options.systems is None:
        for name in [name for name in PEERS if python_of(name, cache) is None]:
            print(f"without {name}: python benchmarks/peers/make_venvs.py makes its environment", file=sys.stderr)
            names.remove(name)
    wanted = [CEILING, ECHO] * options.echo + ["splitfleet", "splitfleet-curve"] * options.curve
    return names + [name for name in dict.fromkeys(wanted) if name not in names]


if __name__ == "__main__":
    main()
