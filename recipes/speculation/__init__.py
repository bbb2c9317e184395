"""Training what guesses ahead of a model: Medusa heads, EAGLE heads, a small draft model."""
