"""The fast CPU engine: C compiled at first use, called through ctypes."""
