"""The allow list: what holds at once, in doubt not, and `splitfleet keys` on top of it."""

from __future__ import annotations

import json
import logging
import stat
import subprocess
import sys

import pytest
from click.testing import CliRunner

from cloud_server.allow_list import AllowList, Holder, Role
from cloud_server.cli.keys import keys
from edge_sdk.errors import ConfigError, SplitfleetError
from edge_sdk.keys import make_key_pair


@pytest.fixture
def allow_list(tmp_path):
    return AllowList(tmp_path / "keys" / "allowed")


def holder(name="cam-1", role=Role.DEVICE):
    return Holder(name=name, role=role, public=make_key_pair()[0])


def test_what_another_process_allows_and_revokes_holds_at_once(allow_list, tmp_path):
    other = AllowList(tmp_path / "keys" / "allowed")
    one, two = holder(), holder("cam-2")
    assert allow_list.holder(one.public) is None
    assert other.all() == []
    for _ in range(20):
        assert other.allow(one)
        assert other.allow(two)
        assert allow_list.holder(one.public) == one
        assert allow_list.holder(two.public) == two
        assert other.revoke(Role.DEVICE, "cam-1") == [one]
        assert allow_list.holder(one.public) is None
        assert allow_list.holder(two.public) == two
        other.revoke(Role.DEVICE, "cam-2")


def test_a_key_has_one_holder(allow_list):
    one = holder()
    assert allow_list.allow(one)
    assert not allow_list.allow(one)
    with pytest.raises(ConfigError, match="allowed for the device 'cam-1' already"):
        allow_list.allow(Holder(name="cam-2", role=Role.DEVICE, public=one.public))
    assert allow_list.holder(one.public) == one


def test_a_name_may_have_two_keys_while_they_are_changed(allow_list):
    old, new = holder(), holder()
    allow_list.allow(old)
    allow_list.allow(new)
    assert allow_list.revoke(Role.DEVICE, old.fingerprint.upper()) == [old]
    assert allow_list.all() == [new]
    with pytest.raises(ConfigError, match="no device key is allowed for"):
        allow_list.revoke(Role.DEVICE, old.fingerprint)
    with pytest.raises(ConfigError, match="no operator key"):
        allow_list.revoke(Role.OPERATOR, "cam-1")
    with pytest.raises(ConfigError, match="no device key"):
        allow_list.revoke(Role.DEVICE, new.fingerprint[:4])


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"name": "x", "role": "king", "public": "y"}', "\x00"])
def test_in_doubt_a_key_is_not_allowed(allow_list, tmp_path, caplog, content):
    one, two = holder(), holder("cam-2")
    allow_list.allow(one)
    allow_list.allow(two)
    (path,) = [path for path in (tmp_path / "keys" / "allowed").iterdir() if path.name.startswith(one.fingerprint)]
    path.write_text(content)
    with caplog.at_level(logging.ERROR):
        assert allow_list.holder(one.public) is None
    assert str(path) in caplog.text
    assert allow_list.holder(two.public) == two
    with pytest.raises(ConfigError, match=path.name):
        allow_list.all()


def test_a_file_under_the_name_of_another_key_allows_nothing(allow_list, tmp_path):
    one, two = holder(), holder("cam-2")
    allow_list.allow(one)
    (path,) = (tmp_path / "keys" / "allowed").iterdir()
    allow_list.allow(two)
    (other,) = set((tmp_path / "keys" / "allowed").iterdir()) - {path}
    other.write_text(path.read_text())
    assert allow_list.holder(two.public) is None


class Keys:
    """`splitfleet keys` in a folder of the test, with all that it ever printed."""

    def __init__(self, folder):
        self.folder = folder
        self.printed = ""

    def __call__(self, *arguments):
        options = ["--home", str(self.folder / "home")] if arguments[1] != "new" or arguments[0] == "server" else []
        done = CliRunner().invoke(keys, [*arguments, *options])
        self.printed += done.output
        if isinstance(done.exception, SplitfleetError):
            raise done.exception
        assert done.exit_code == 0, done.output
        return done


@pytest.fixture
def command(tmp_path):
    return Keys(tmp_path)


def test_the_keys_of_a_fleet(command, tmp_path, allow_list):
    made = tmp_path / "made"
    allow_list = AllowList(tmp_path / "home" / "keys" / "allowed")
    command("server", "new")
    document = json.loads(command("device", "new", "cam-1", "--out", str(made), "--json").stdout)
    assert document["secret_file"] == str(made / "cam-1.key")
    command("operator", "new", "boss", "--out", str(made))
    command("device", "allow", str(made / "cam-1.pub"))
    command("operator", "allow", str(made / "boss.pub"))
    listed = json.loads(command("device", "list", "--json").stdout)["keys"]
    assert [(each["name"], each["role"], each["public_key"]) for each in listed] == [
        ("cam-1", "device", document["public_key"])
    ]
    assert listed[0]["fingerprint"] in command("device", "list").stdout
    assert allow_list.holder(document["public_key"]).name == "cam-1"
    assert json.loads(command("device", "allow", str(made / "cam-1.pub"), "--json").stdout)["new"] is False
    revoked = json.loads(command("device", "revoke", "cam-1", "--json").stdout)["revoked"]
    assert [each["fingerprint"] for each in revoked] == [listed[0]["fingerprint"]]
    assert [each.name for each in allow_list.all()] == ["boss"]

    folder = tmp_path / "home" / "keys"
    secrets = [folder / "server.key", made / "cam-1.key", made / "boss.key"]
    for path in secrets:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        secret = path.read_text().split('secret-key = "')[1].split('"')[0]
        assert len(secret) == 40
        assert secret not in command.printed


@pytest.mark.parametrize("arguments", [("server", "new"), ("device", "new", "cam-1")])
def test_no_key_is_overwritten(command, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    command(*arguments)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.key")}
    assert len(before) == 1
    with pytest.raises(ConfigError, match="never overwritten"):
        command(*arguments)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.key")} == before


def test_a_device_makes_its_key_without_what_a_server_installs(tmp_path):
    program = (
        "import sys\n"
        "from cloud_server.cli import cli\n"
        "cli.main(['keys', 'device', 'new', 'cam-1'], standalone_mode=False)\n"
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "cam-1.pub\n"
    loaded = set(done.stderr.splitlines()[-1].split())
    assert not loaded & {"numpy", "tensorflow", "sqlalchemy", "alembic", "rich", "pydantic", "yaml"}


def test_only_public_keys_of_the_role_are_allowed(command, tmp_path):
    made = str(tmp_path)
    command("device", "new", "cam-1", "--out", made)
    command("operator", "new", "boss", "--out", made)
    for arguments, text in (
        (("device", "allow", f"{made}/cam-1.key"), "holds a secret key"),
        (("device", "allow", f"{made}/boss.pub"), "role 'operator', not for 'device'"),
        (("operator", "allow", f"{made}/cam-1.pub"), "role 'device', not for 'operator'"),
        (("device", "allow", f"{made}/none.pub"), "cannot be read"),
        (("device", "allow", f"{made}/cam-1.pub", "--name", "a b"), "cannot be the name"),
    ):
        with pytest.raises(ConfigError, match=text):
            command(*arguments)
    assert json.loads(command("device", "list", "--json").stdout) == {"keys": []}
