"""Importing this module registers every command; each module below adds its own to the application."""

from eqprop.cli import bench, demo, gdu, report, reproduce, reproduce_table1, train, tune  # noqa: F401
