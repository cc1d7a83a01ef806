"""Acme's driver for the Toy accelerator. The runtime is not imported before the driver is asked for."""

from acme_toy_1_0.driver import Driver

__all__ = ["Driver"]
