"""Requests of the APIs as they arrive, checked field by field; nothing is ignored silently."""
