"""The device side of splitfleet."""
