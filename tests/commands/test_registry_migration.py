"""A registry from before there were tasks and models of users is upgraded with all that is in it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from cloud_server.registry import Registry
from cloud_server.registry.engine import make_engine
from cloud_server.registry.library import InputFacts, ModelRecord, TaskRecord
from cloud_server.registry.migrate import MIGRATIONS
from edge_sdk.errors import ConfigError

NOW = datetime(2030, 1, 1, tzinfo=UTC)
DIGEST = "ab" * 32


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A database of revision 0001 with a device in it."""
    url = f"sqlite:///{tmp_path / 'registry.db'}"
    engine = make_engine(url)
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        assert "user_tasks" not in sa.inspect(connection).get_table_names()
        connection.execute(
            sa.text(
                "INSERT INTO devices VALUES ('board', 'rpi', 123, '{}', '{}', '0.1', '2029-01-01 00:00:00',"
                " '2029-01-02 00:00:00')"
            )
        )
    engine.dispose()
    return url


def task(name: str) -> TaskRecord:
    return TaskRecord(
        name=name,
        metric="accuracy",
        inputs={"picture": InputFacts(shape=(8, 8, 1), dtype="uint8")},
        classes=3,
        validation_sha256=DIGEST,
        validation_samples=10,
        calibration_sha256=DIGEST,
        calibration_samples=20,
        test_sha256=None,
        test_samples=None,
        added_at=NOW,
    )


def model(name: str, of: str) -> ModelRecord:
    return ModelRecord(
        name=name,
        task=of,
        file_sha256=DIGEST,
        file_bytes=2**40,
        suffix=".keras",
        custom_objects=("layers:Gate",),
        input_shapes=((None, (8, 8, 1)), ("other", (2,))),
        unsafe=True,
        model_sha256=DIGEST,
        operations=4,
        parameters=2**40,
        added_at=NOW,
    )


def test_the_upgrade_keeps_what_is_there_and_adds_the_library(url: str) -> None:
    with Registry(url) as registry:
        (device,) = registry.devices()
        assert (device.device_id, device.model_ram_bytes) == ("board", 123)
        registry.add_user_task(task("halves"))
        registry.add_user_model(model("mine", "halves"))
    with Registry(url) as registry:
        assert registry.user_tasks() == [task("halves")]
        assert registry.user_models() == [model("mine", "halves")]


def test_heads_of_before_there_were_precisions_are_int8(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'registry.db'}"
    engine = make_engine(url)
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0002")
        tables = sa.MetaData()
        tables.reflect(connection)

        def insert(table: str, **values: Any) -> None:
            columns = tables.tables[table].columns
            zeros = {each.name: _zero(each.type) for each in columns if not each.nullable and each.name not in values}
            connection.execute(tables.tables[table].insert().values(**zeros | values))

        insert("devices", id="board")
        insert("runs", id=1, state="accepted")
        insert("rounds", id=1, run_id=1, number=1)
        placed = {"k": 1, "n": 2, "cut": "c", "predicted_bytes": 3, "whole_bytes": 4, "bundle": DIGEST}
        insert("trials", id=1, run_id=1, round_id=1, device_id="board", number=1, state="accepted", **placed)
        insert("trials", id=2, run_id=1, round_id=1, device_id="board", number=2, state="does_not_fit")
    engine.dispose()
    with Registry(url) as registry:
        first, second = registry.trials(1)
    assert first.placement is not None
    assert (first.placement.precision, first.placement.precision_reason) == ("int8", "")
    assert second.placement is None


def _zero(kind: sa.types.TypeEngine[Any]) -> Any:
    if isinstance(kind, sa.DateTime):
        return NOW
    if isinstance(kind, sa.JSON):
        return {}
    return "" if isinstance(kind, sa.String) else 0


def test_a_name_is_taken_until_it_is_removed(url: str) -> None:
    with Registry(url) as registry:
        registry.add_user_task(task("halves"))
        registry.add_user_model(model("mine", "halves"))
        with pytest.raises(ConfigError, match="there is a task 'halves' already"):
            registry.add_user_task(task("halves"))
        with pytest.raises(ConfigError, match="there is a model 'mine' already"):
            registry.add_user_model(model("mine", "other"))
        with pytest.raises(ConfigError, match="remove them first"):
            registry.remove_user_task("halves", now=NOW)
        for _ in range(2):
            registry.remove_user_model("mine", now=NOW)
            registry.remove_user_task("halves", now=NOW)
            assert registry.user_tasks() == registry.user_models() == []
            registry.add_user_task(task("halves"))
            registry.add_user_model(model("mine", "halves"))
