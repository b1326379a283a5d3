"""The paper's algorithm written the obvious way, and the command that times every engine against it."""
