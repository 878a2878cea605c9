"""What runs tails: one engine a module, behind the contract of :mod:`cloud_server.engines.base`."""
