"""The facts of a device kind, schema version 1."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from device_profiles.document import Size, StrictModel

SCHEMA_VERSION = 1
NAME_PATTERN = r"^[a-z0-9][a-z0-9.-]{0,62}$"

PositiveMbit = Annotated[float, Field(gt=0, le=100_000)]
RoundTripMs = Annotated[float, Field(ge=0, le=60_000)]


class Link(StrictModel):
    """What lies between a device and its server; rates are those of the payload."""

    uplink_mbit_s: PositiveMbit
    downlink_mbit_s: PositiveMbit
    rtt_ms: RoundTripMs


class Profile(StrictModel):
    """Immutable facts of one kind of device.

    ``cpu_slowdown`` says how many times longer one core takes than one core of ``reference``; the two come together.
    Without them the speed is not known, without ``link`` the way to the server is not: neither is emulated then.
    """

    schema_version: Literal[1]
    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    title: Annotated[str, Field(min_length=1, max_length=120)]
    ram_bytes: Annotated[Size, Field(alias="ram")]
    model_ram_share: Annotated[float, Field(gt=0, le=1)]
    model_ram_bytes: Size | None = None
    cores: Annotated[int, Field(ge=1, le=1024)]
    architecture: Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
    runtime: Literal["litert", "tflite-runtime"]
    cpu_slowdown: Annotated[float, Field(gt=0, le=1000)] | None = None
    reference: Annotated[str, Field(min_length=1)] | None = None
    link: Link | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if (self.cpu_slowdown is None) != (self.reference is None):
            raise ValueError("cpu_slowdown and reference come together or not at all")
        if self.model_ram_bytes is not None and self.model_ram_bytes > self.ram_bytes:
            raise ValueError(f"model_ram_bytes {self.model_ram_bytes} exceeds ram, {self.ram_bytes} bytes")
        return self

    @property
    def memory_budget_bytes(self) -> int:
        """What a model may use: ``model_ram_bytes`` where given, else the share of the RAM."""
        return self.model_ram_bytes or int(self.ram_bytes * self.model_ram_share)
