"""Calls of tools: what a request offers, how a model is held to it, and how its text is read.

One file a family of models: `hermes`, `qwen3_coder`, `llama3_json`, `pythonic`, `mistral`,
`deepseek`, `gemma4`, `harmony`. Each says how calls are written, reads them from text that arrives
in pieces, and writes them, for conversations and for grammars.
"""
