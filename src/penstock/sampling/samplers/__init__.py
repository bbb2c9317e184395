"""Ways to choose among tokens, one a file; `chain` puts them in order."""
