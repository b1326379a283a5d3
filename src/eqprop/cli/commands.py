"""Importing this module registers every command; each module below adds its own to the application."""

from eqprop.cli import train  # noqa: F401
