"""splitfleet-edge: exit codes, one line for an error, one document for --json, and what is loaded."""

import json
import subprocess
import sys

import numpy as np
import pytest

from edge_sdk.bundle import Bundle

COMMANDS = ["run", "detect", "measure", "infer"]
HEAVY = ("tensorflow", "keras", "sqlalchemy", "alembic", "rich", "pydantic", "yaml", "ai_edge_litert", "tflite_runtime")


def edge(*arguments, **options):
    program = "from edge_sdk.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, check=False, **options
    )


@pytest.fixture
def sample(tmp_path, image):
    np.save(tmp_path / "image.npy", image)
    return tmp_path / "image.npy"


def test_detect_prints_a_profile():
    done = edge("detect")
    assert done.returncode == 0
    profile = json.loads(done.stdout)
    assert profile["schema_version"] == 1
    assert profile["ram"] > 0
    assert profile["cores"] >= 1
    assert {"name", "title", "model_ram_share", "architecture", "runtime"} < set(profile)


def test_infer_through_a_server(bundles, start_peer, tail_handler, sample):
    peer = start_peer(tail_handler)
    done = edge("infer", "--server", peer.endpoint, "--bundle", bundles / "split", "--json", sample)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert list(document["outputs"]) == ["scores", "early"]
    timing = document["timing"]
    assert timing["total_s"] == pytest.approx(timing["edge_s"] + timing["transfer_s"] + timing["cloud_s"])
    assert document["bundle"] == Bundle.open(bundles / "split").digest
    plain = edge("infer", "--server", peer.endpoint, "--bundle", bundles / "split", sample)
    assert plain.stdout.startswith("scores [3]: ")
    assert "bytes sent" in plain.stdout


def test_infer_by_name(bundles, tmp_path):
    np.savez(tmp_path / "two.npz", vector=np.ones(4), index=np.array([3]))
    done = edge("infer", "--bundle", bundles / "pair", "--json", tmp_path / "two.npz")
    assert len(json.loads(done.stdout)["outputs"]["mix"]) == 3


def test_measure(bundles):
    done = edge("measure", bundles / "whole", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["bundle"] == Bundle.open(bundles / "whole").digest
    assert document["peak_bytes"] == document["tenth_invoke_peak_bytes"] > 0
    assert "growth of a fresh process" in edge("measure", bundles / "whole").stdout


@pytest.mark.parametrize(
    ("arguments", "exit_code", "complaint"),
    [
        (["infer", "--bundle", "{bundles}/none", "{sample}"], 1, "no bundle: manifest.json cannot be read"),
        (["infer", "--bundle", "{bundles}/split", "{sample}"], 1, "name the server"),
        (["infer", "--bundle", "{bundles}/whole", "{bundles}/whole/head.tflite"], 1, "cannot be read as .npy"),
        (["infer", "--bundle", "{bundles}/whole", "{bundles}/none.npy"], 1, "No such file"),
        (["infer", "--bundle", "{bundles}/pair", "{sample}"], 1, "expected arrays by name"),
        (["infer", "--bundle", "{bundles}/whole"], 2, "Missing argument"),
        (["infer", "--bundle", "{bundles}/whole", "{sample}", "--runtime", "torch"], 2, "'torch' is not one of"),
        (
            ["infer", "--server", "{nobody}", "--timeout", "0.2", "--bundle", "{bundles}/split", "{sample}"],
            4,
            "no splitfleet peer answers",
        ),
        (["infer", "--server", "here", "--bundle", "{bundles}/split", "{sample}"], 2, "is not an endpoint"),
        (["measure", "{bundles}/raw"], 1, "has no head"),
        (["measure", "{bundles}/none"], 1, "no bundle"),
        (["run"], 2, "Missing option '--server'"),
        (["run", "--server", "here", "--store", "{bundles}/s"], 2, "is not an endpoint"),
        (["run", "--server", "{nobody}", "--store", "{bundles}/s", "--device-id", "a b"], 2, "is not a device id"),
        (["run", "--server", "{nobody}", "--store", "{bundles}/s", "--model-ram", "8 pounds"], 2, "is not a size"),
        (["run", "--server", "{nobody}", "--store", "{bundles}/s", "--model-ram", "0"], 2, "--model-ram"),
        (
            ["run", "--server", "{nobody}", "--store", "{bundles}/s", "--model-ram", "9" * 400],
            2,
            "too large for a size",
        ),
        (["run", "--server", "{nobody}", "--store", "{bundles}/s", "--ram-share", "0"], 2, "--ram-share"),
        (["run", "--server", "{nobody}", "--store", "{bundles}/s", "--ram-share", "nan"], 2, "--ram-share"),
        (["run", "--server", "{nobody}", "--store", "{bundles}/s", "--ram-share", "1e-300"], 2, "--ram-share"),
        (["infer", "--bundle", "{bundles}/whole", "{sample}", "--timeout", "nan"], 2, "nan is not a finite number"),
        (["infer", "--bundle", "{bundles}/whole", "{sample}", "--timeout", "inf"], 2, "--timeout"),
        (["infer", "--bundle", "{bundles}/whole", "{sample}", "--timeout", "1e300"], 2, "--timeout"),
        (["infer", "--bundle", "{bundles}/whole", "{sample}", "--timeout", "86401"], 2, "--timeout"),
        (["run", "--server", "{nobody}", "--store", "{bundles}/s", "--emulation", "[]"], 1, "--emulation"),
        (["run", "--server", "{nobody}", "--store", "{bundles}/s", "--emulation", '{"cpu_slowdown": 0}'], 1, "--emul"),
        (["run", "--server", "{nobody}", "--store", "{sample}"], 1, "--store"),
        (["dance"], 2, "No such command"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(bundles, sample, free_endpoint, arguments, exit_code, complaint):
    places = {"bundles": bundles, "sample": sample, "nobody": free_endpoint}
    filled = [argument if argument.startswith('{"') else argument.format(**places) for argument in arguments]
    done = edge(*filled)
    assert done.returncode == exit_code, done.stderr
    assert complaint in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    if exit_code != 2:
        assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == done.stderr.splitlines()[
            -1:
        ]


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_loads_nothing_heavy(command):
    code = (
        "import sys; from edge_sdk.cli import cli\n"
        f"try: cli.main({[*command, '--help']!r}, prog_name='splitfleet-edge')\n"
        "except SystemExit as end: assert not end.code\n"
        f"print([m for m in sys.modules if m.partition('.')[0] in {(*HEAVY, 'numpy', 'zmq')!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: splitfleet-edge")
    assert done.stdout.splitlines()[-1] == "[]"


def _loaded_after(code, *arguments):
    program = f"import sys; {code}; print(sorted({{m.partition('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    return set(eval(done.stdout.splitlines()[-1]))


def test_importing_the_sdk_loads_next_to_nothing():
    assert _loaded_after("import edge_sdk") & {*HEAVY, "numpy", "zmq", "msgpack", "click"} == set()


def test_using_the_sdk_loads_no_tensorflow(bundles, start_peer, tail_handler, sample):
    code = (
        "import numpy; from edge_sdk import SplitClient\n"
        "with SplitClient(sys.argv[1], bundle=sys.argv[2]) as client: client.infer(numpy.load(sys.argv[3]))\n"
        "import edge_sdk.agent"
    )
    loaded = _loaded_after(code, start_peer(tail_handler).endpoint, str(bundles / "split"), str(sample))
    assert "edge_sdk" in loaded
    assert loaded & (set(HEAVY) - {"ai_edge_litert", "tflite_runtime"}) == set()
    # asyncio alone would add a fifth to the memory of an agent at rest.
    assert "asyncio" not in loaded
    assert loaded & {"cloud_server", "converters", "zoo_keras", "device_profiles"} == set()


def test_the_public_names():
    import edge_sdk

    assert edge_sdk.__all__ == ["Bundle", "CurveKeys", "InferReply", "SplitClient", "SplitfleetError", "Timing"]
    assert all(getattr(edge_sdk, name).__name__ == name for name in edge_sdk.__all__)
    assert set(edge_sdk.__all__) <= set(dir(edge_sdk))
    with pytest.raises(AttributeError, match="Tail"):
        edge_sdk.Tail  # noqa: B018
