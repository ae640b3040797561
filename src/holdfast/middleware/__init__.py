"""Engines around engines: what must hold for every capability is written once, here, and composes."""
