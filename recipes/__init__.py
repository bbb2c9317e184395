"""How the models that ship with Penstock are made, from raw text to weights."""
