"""The cloud side of splitfleet: server, tail engines, registry, repository, allocation, emulation lab and CLI."""
