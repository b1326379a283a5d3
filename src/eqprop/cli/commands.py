"""Importing this module registers every command; each module below adds its own to the application."""

# `eqprop --help` names the commands in this order.
from eqprop.cli import bench, train, demo, gdu, report, tune, reproduce, reproduce_table1  # noqa: F401, I001
