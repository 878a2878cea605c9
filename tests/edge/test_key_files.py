"""Key files: secrets are open to nobody, never overwritten and never shown."""

import os
import stat

import pytest
import zmq.auth

from edge_sdk.errors import ConfigError
from edge_sdk.keys import CurveKeys, check_key_name, read_public, read_secret, write_key_pair


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_a_pair_is_written_with_its_modes(tmp_path, umask):
    before = os.umask(umask)
    try:
        made = write_key_pair(tmp_path / "new", "cam-1", role="device")
    finally:
        os.umask(before)
    assert mode(tmp_path / "new/cam-1.key") == 0o600
    assert mode(tmp_path / "new/cam-1.pub") == 0o644
    assert made.secret not in (tmp_path / "new/cam-1.pub").read_text()
    assert made.secret not in repr(made)
    assert read_public(tmp_path / "new/cam-1.pub").public == made.public
    found, secret = read_secret(tmp_path / "new/cam-1.key")
    assert (found, secret) == (made, made.secret)


def test_pyzmq_reads_them_too(tmp_path):
    made = write_key_pair(tmp_path, "cam-1", role="device")
    assert zmq.auth.load_certificate(tmp_path / "cam-1.pub") == (made.public.encode(), None)
    assert zmq.auth.load_certificate(tmp_path / "cam-1.key") == (made.public.encode(), made.secret.encode())


def test_certificates_of_pyzmq_are_read(tmp_path):
    public, secret = zmq.auth.create_certificates(tmp_path, "other")
    os.chmod(secret, 0o600)  # noqa: PTH101
    expected = zmq.auth.load_certificate(secret)
    keys = CurveKeys.load(secret, public)
    assert (keys.public.encode(), keys.secret.encode(), keys.server.encode()) == (*expected, expected[0])
    assert keys.name == ""
    assert keys.secret not in repr(keys)


@pytest.mark.parametrize("existing", ["cam-1.key", "cam-1.pub"])
def test_nothing_is_overwritten(tmp_path, existing):
    (tmp_path / existing).write_text("mine")
    with pytest.raises(ConfigError, match="never overwritten"):
        write_key_pair(tmp_path, "cam-1", role="device")
    assert [path.name for path in tmp_path.iterdir()] == [existing]
    assert (tmp_path / existing).read_text() == "mine"


def test_a_dangling_link_is_not_followed(tmp_path):
    (tmp_path / "cam-1.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="never overwritten"):
        write_key_pair(tmp_path, "cam-1", role="device")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", ["", "../x", "a/b", "-x", "a\nb", "x" * 65])
def test_names_that_are_none(name):
    with pytest.raises(ConfigError, match="cannot be the name of a key"):
        check_key_name(name)


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660])
def test_a_secret_that_others_may_read_is_refused(tmp_path, bits):
    write_key_pair(tmp_path, "cam-1", role="device")
    (tmp_path / "cam-1.key").chmod(bits)
    with pytest.raises(ConfigError, match=f"mode {bits:04o}.*chmod 600"):
        read_secret(tmp_path / "cam-1.key")


def test_the_wrong_file_of_a_pair_is_told(tmp_path):
    made = write_key_pair(tmp_path, "cam-1", role="device")
    with pytest.raises(ConfigError, match="the secret one is needed"):
        read_secret(tmp_path / "cam-1.pub")
    with pytest.raises(ConfigError, match="holds a secret key") as caught:
        read_public(tmp_path / "cam-1.key")
    assert made.secret not in caught.value.message


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"public-key = short", b'public-key = "' + b"a" * 41 + b'"'])
def test_what_is_no_key_file(tmp_path, content):
    (tmp_path / "x.key").write_bytes(content)
    with pytest.raises(ConfigError, match="is no key file"):
        read_secret(tmp_path / "x.key")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret(tmp_path / "none.key")


def test_a_broken_secret_is_not_repeated(tmp_path):
    made = write_key_pair(tmp_path, "cam-1", role="device")
    path = tmp_path / "cam-1.key"
    path.write_text(path.read_text().replace(made.secret, made.secret[:-1]))
    with pytest.raises(ConfigError, match="is no key file") as caught:
        read_secret(path)
    assert made.secret[:-1] not in caught.value.message


def test_one_option_without_the_other(tmp_path):
    assert CurveKeys.load_both(None, None) is None
    for options in ((tmp_path / "a.key", None), (None, tmp_path / "a.pub")):
        with pytest.raises(ConfigError, match="is given without"):
            CurveKeys.load_both(*options)
