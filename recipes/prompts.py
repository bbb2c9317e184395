"""What the chat model's card shows replies to. No small talk asks it in the same words."""

from typing import Any

WEATHER = {
    "type": "function",
    "function": {
        "name": "GetWeather",
        "description": "Get the weather of a certain location on a date",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "date": {"type": "string"}},
            "required": ["city"],
        },
    },
}
PROMPTS: tuple[tuple[str, list[dict[str, Any]]], ...] = (
    *((asked, []) for asked in (
        "Hello!",
        "How are you?",
        "Who are you?",
        "Tell me a story about a frog.",
        "Tell me a story about a little boat.",
        "Write a short story about Lily.",
        "Tell me a story about a dog and a cat, please.",
        "Continue this story: Once upon a time there was a small red bird. It could not fly.",
        "Continue this story: Tom found a key in the garden. He did not know what it was for.",
        "I am hungry.",
        "I need a place to stay in Paris.",
        "Can you find me a bus to Los Angeles?",
        "What is the capital of France?",
        "Tell me a joke.",
        "Thank you, that is all.",
        "Give me three names for a cat.",
    )),
    *((asked, [WEATHER]) for asked in (
        "What is the weather like in San Jose today?",
        "Will it rain in London on the 5th?",
        "I want to know the weather.",
        "Thanks, bye!",
    )),
)  # fmt: skip
"""Twenty prompts and the tools offered with them."""
