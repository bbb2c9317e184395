"""Heads that guess by the states of another model: public layouts of their checkpoints."""
