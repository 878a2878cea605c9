"""The emulation lab: devices of given profiles on this machine, as processes of their own, everything labelled."""
