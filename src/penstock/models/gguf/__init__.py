"""GGUF files: one file with the tensors, what `config.json` would say, and the tokenizer."""
