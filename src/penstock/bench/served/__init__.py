"""Checkups of a server that runs, by what it tells of itself."""

from penstock.bench.served.checkup import ServedCheckup, check_up_served

__all__ = ["ServedCheckup", "check_up_served"]
