"""Measuring a model here, each result beside what this machine allows."""
