"""The endpoints, a file for each API."""
