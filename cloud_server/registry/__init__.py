"""The registry: what is known of devices, runs, trials and allocations, in an SQL database that survives a restart."""

from cloud_server.registry.store import Registry

__all__ = ["Registry"]
