"""Fledge: train, check and serve EAGLE 3.1 drafters."""

__version__ = "0.1.0"
