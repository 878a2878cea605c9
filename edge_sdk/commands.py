"""The commands of ``splitfleet-edge``: they read options, print, and leave the work to the modules that they import."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_sdk.command import ENDPOINT, CheckedText, FiniteRange, SizeType, keys_options
from edge_sdk.errors import ConfigError, InvalidInputError
from edge_sdk.protocol import MAX_TIMEOUT_S, check_device_id

if TYPE_CHECKING:
    from edge_sdk.client import InferReply
    from edge_sdk.head import Sample

DEFAULT_RAM_SHARE = 0.5
# Not from edge_sdk.runtime, which imports numpy: --help is to be quick.
RUNTIME_NAMES = ("litert", "tflite-runtime")

runtime_option = click.option(
    "--runtime", type=click.Choice(RUNTIME_NAMES), help="TFLite runtime, else the first usable."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.command()
@click.option(
    "--server", required=True, type=ENDPOINT, metavar="ENDPOINT", help="Where the server listens, tcp://HOST:PORT."
)
@click.option(
    "--device-id",
    type=CheckedText("id", check_device_id),
    metavar="ID",
    help="Name in the fleet, else that of --key, else one that the store keeps.",
)
@click.option(
    "--store",
    type=click.Path(path_type=Path),
    help="Folder for bundles, one for each device.  [default: $SPLITFLEET_EDGE_STORE or the user's data folder]",
)
@click.option("--model-ram", type=SizeType(), metavar="SIZE", help="Memory budget of a model, such as 8MB.")
@click.option(
    "--ram-share",
    type=FiniteRange(0, 1, min_open=True),
    default=DEFAULT_RAM_SHARE,
    show_default=True,
    metavar="F",
    help="Memory budget as a share of the RAM, where --model-ram is not given.",
)
@click.option("--profile", metavar="NAME", help="Name of this device's profile, for the fleet's tables.")
@keys_options
@runtime_option
@click.option("--emulation", metavar="JSON", hidden=True)
def run(
    server: str,
    device_id: str | None,
    store: Path | None,
    model_ram: int | None,
    ram_share: float,
    profile: str | None,
    key: Path | None,
    server_key: Path | None,
    runtime: str | None,
    emulation: str | None,
) -> None:
    """Register this machine at a server and do there what the allocator asks, until SIGTERM or Ctrl-C."""
    import logging
    import signal

    from edge_sdk.agent import Agent, AgentSettings
    from edge_sdk.keys import CurveKeys
    from edge_sdk.resources import detect as detect_resources
    from edge_sdk.store import DeviceStore, default_store

    model_ram_bytes = int(detect_resources().ram_bytes * ram_share) if model_ram is None else model_ram
    if model_ram_bytes == 0:
        raise click.UsageError("no model fits a memory budget of 0 bytes: see --model-ram and --ram-share")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    labels, cpu_slowdown = _emulation(emulation)
    keys = CurveKeys.load_both(key, server_key)
    wanted_id = device_id or (keys.name if keys is not None else "")
    with DeviceStore.open(store or default_store()) as device_store:
        settings = AgentSettings(
            server=server,
            device_id=check_device_id(wanted_id) if wanted_id else device_store.device_id(),
            model_ram_bytes=model_ram_bytes,
            profile=profile,
            runtime=runtime,
            emulation=labels,
            cpu_slowdown=cpu_slowdown,
            keys=keys,
        )
        agent = Agent(settings, device_store)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: agent.stop())
        agent.run()


@click.command()
def detect() -> None:
    """Print the facts of this machine as a device profile, in JSON, which is YAML too.

    Speed and link are not known from inside and left out.
    """
    import platform
    import re

    from edge_sdk.resources import detect as detect_resources

    resources = detect_resources()
    host = platform.node() or "device"
    profile = {
        "schema_version": 1,
        "name": re.sub(r"[^a-z0-9.-]+", "-", host.lower()).strip("-.")[:63] or "device",
        "title": f"{host} (detected)",
        "ram": resources.ram_bytes,
        "model_ram_share": DEFAULT_RAM_SHARE,
        "cores": resources.cores,
        "architecture": resources.architecture,
        "runtime": next(iter(resources.runtimes), RUNTIME_NAMES[0]),
    }
    click.echo(json.dumps(profile, indent=2))


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@runtime_option
@json_option
def measure(bundle: Path, runtime: str | None, as_json: bool) -> None:
    """Measure the memory that the head of BUNDLE takes on this machine, in a fresh process."""
    from edge_sdk.bundle import Bundle
    from edge_sdk.memory import measure as measure_head
    from edge_sdk.runtime import choose_runtime, runtime_version
    from edge_sdk.sizes import format_size

    opened = Bundle.open(bundle)
    opened.verify(opened.manifest.head_files)
    if not opened.manifest.has_head:
        raise InvalidInputError(f"{bundle}: this bundle has no head: nothing runs on the device")
    measured = measure_head(opened.head_path, runtime=choose_runtime(runtime))
    document = {
        "bundle": opened.digest,
        "runtime": measured.runtime,
        "runtime_version": runtime_version(measured.runtime),
        "peak_bytes": measured.peak_bytes,
        "load_peak_bytes": measured.load_peak_bytes,
        "first_invoke_peak_bytes": measured.first_invoke_peak_bytes,
        "tenth_invoke_peak_bytes": measured.tenth_invoke_peak_bytes,
        "base_bytes": measured.base_bytes,
        "exact": measured.exact,
    }
    if as_json:
        click.echo(json.dumps(document))
        return
    click.echo(f"{measured.runtime} {document['runtime_version']}, growth of a fresh process:")
    click.echo(f"  loaded            {format_size(measured.load_peak_bytes)}")
    click.echo(f"  first invoke      {format_size(measured.first_invoke_peak_bytes)}")
    click.echo(f"  tenth invoke      {format_size(measured.tenth_invoke_peak_bytes)}")
    click.echo(f"  above the process {format_size(measured.base_bytes)}")
    if not measured.exact:
        click.echo("the kernel lets no process reset its peak here: short peaks may be missed", err=True)


@click.command()
@click.option(
    "--server",
    type=ENDPOINT,
    metavar="ENDPOINT",
    help="Where the server listens; needed where the bundle has a tail.",
)
@click.option("--bundle", type=click.Path(path_type=Path), required=True, help="Folder of the bundle.")
@click.option(
    "--timeout", "timeout_s", type=FiniteRange(0, MAX_TIMEOUT_S, min_open=True), default=10.0, show_default=True
)
@keys_options
@runtime_option
@json_option
@click.argument("sample", metavar="INPUT.npy", type=click.Path(path_type=Path))
def infer(
    server: str | None,
    bundle: Path,
    timeout_s: float,
    key: Path | None,
    server_key: Path | None,
    runtime: str | None,
    as_json: bool,
    sample: Path,
) -> None:
    """Infer the sample in INPUT.npy; a model of several inputs takes an .npz with an array for each."""
    from edge_sdk.client import SplitClient
    from edge_sdk.keys import CurveKeys

    keys = CurveKeys.load_both(key, server_key)
    value = _read_sample(sample)
    with SplitClient(server, bundle=bundle, timeout_s=timeout_s, runtime=runtime, keys=keys) as client:
        reply = client.infer(value)
    if as_json:
        click.echo(json.dumps(_as_document(reply)))
        return
    for name, output in reply.outputs.items():
        click.echo(f"{name} {list(output.shape)}: {output.ravel()[:16]}{' …' if output.size > 16 else ''}")
    timing = reply.timing
    click.echo(
        f"edge {timing.edge_s * 1e3:.2f} ms + transfer {timing.transfer_s * 1e3:.2f} ms "
        f"+ cloud {timing.cloud_s * 1e3:.2f} ms = {timing.total_s * 1e3:.2f} ms; {reply.sent_bytes} bytes sent"
    )


def _as_document(reply: InferReply) -> dict[str, Any]:
    timing = reply.timing
    return {
        "outputs": {name: output.tolist() for name, output in reply.outputs.items()},
        "timing": {
            "edge_s": timing.edge_s,
            "transfer_s": timing.transfer_s,
            "cloud_s": timing.cloud_s,
            "total_s": timing.total_s,
            "encode_s": timing.encode_s,
            "queue_s": timing.queue_s,
            "batch_wait_s": timing.batch_wait_s,
            "compute_s": timing.compute_s,
        },
        "bundle": reply.bundle,
        "sent_bytes": reply.sent_bytes,
        "received_bytes": reply.received_bytes,
    }


def _read_sample(path: Path) -> Sample:
    import zipfile

    import numpy as np

    try:
        loaded = np.load(path, allow_pickle=False)
        return {name: loaded[name] for name in loaded} if isinstance(loaded, Mapping) else loaded
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidInputError(f"{path}: cannot be read as .npy or .npz: {error}") from None


def _emulation(text: str | None) -> tuple[Any, float]:
    """Labels and the CPU slowdown of ``--emulation``."""
    from edge_sdk.protocol import Emulation

    try:
        document = json.loads(text) if text else {}
        cpu_slowdown = float(document.pop("cpu_slowdown", 1.0))
        if not cpu_slowdown >= 1:
            raise ValueError(f"cpu_slowdown must be at least 1, got {cpu_slowdown}")
        return Emulation.from_body(document), cpu_slowdown
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"--emulation: {text!r} is not as the lab writes it: {error}") from None
