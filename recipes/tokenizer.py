"""A byte-level BPE of 8,192 tokens, and the chat template that goes with it.

Every byte is a token, so any text survives the round trip.
"""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

VOCAB_SIZE = 8192
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, IM_START, IM_END)  # ids 0, 1, 2; never part of a text
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")  # ids 3 to 6; visible
# Words with their leading space (an identifier is one: has_live_music), single digits, runs of
# punctuation, whitespace.
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+(?:_\p{L}+)*|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# A tool takes one line, `name(argument, optional?, choice=a|b): description`: its JSON schema would
# fill a context of 1,024 tokens. Calls and results are JSON, in Hermes' form.
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- if tools or (messages and messages[0].role == 'system') %}
{{- '<|im_start|>system\\n' }}
{%- if messages and messages[0].role == 'system' %}
{%- if messages[0].content is string %}
{{- messages[0].content }}
{%- else %}
{%- for part in messages[0].content %}{{- part.text }}{%- endfor %}
{%- endif %}
{{- '\\n' if tools else '' }}
{%- endif %}
{%- if tools %}
{{- 'Tools:' }}
{%- for tool in tools %}
{%- set function = tool.function if tool.function is defined else tool %}
{%- set schema = function.parameters or {} %}
{%- set required = schema.required or [] %}
{{- '\\n' + function.name + '(' }}
{%- for name, kind in (schema.properties or {}).items() %}
{{- name + ('' if name in required else '?') }}
{%- if kind.enum is defined %}
{{- '=' + kind.enum | join('|') }}
{%- elif kind.type is defined and kind.type != 'string' %}
{{- ': ' + (kind.type if kind.type is string else kind.type | tojson) }}
{%- endif %}
{{- '' if loop.last else ', ' }}
{%- endfor %}
{{- ')' + (': ' + function.description if function.description else '') }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' }}
{{- '<tool_response>' if message.role == 'tool' else '' }}
{%- if message.content is string %}
{{- message.content }}
{%- elif message.content %}
{%- for part in message.content %}{{- part.text }}{%- endfor %}
{%- endif %}
{{- '</tool_response>' if message.role == 'tool' else '' }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function if call.function is defined else call %}
{%- set arguments = function.arguments %}
{{- '<tool_call>{"name": "' + function.name + '", "arguments": ' }}
{{- arguments if arguments is string else arguments | tojson }}
{{- '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@cache
def _template() -> Any:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(CHAT_TEMPLATE)


def render(
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
    add_generation_prompt: bool = False,
) -> str:
    """A conversation as the model reads it; the same text that engines make of the template."""
    return str(
        _template().render(
            messages=messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            bos_token=END_OF_TEXT,
        )
    )


def train_tokenizer(documents: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Learn merges from `documents`; special tokens and tags get ids 0 to 6."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL, *TAGS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)]
    )
    # Tags are tokens of their own, but a client must see them: they aren't special after all.
    described = json.loads(tokenizer.to_str())
    for token in described["added_tokens"]:
        token["special"] = token["content"] in SPECIAL
    return Tokenizer.from_str(json.dumps(described, ensure_ascii=False))


def tokenizer_config(context: int) -> dict[str, Any]:
    """tokenizer_config.json of every model of the family."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [IM_START, IM_END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }


def generation_config(chat: bool) -> dict[str, Any]:
    """generation_config.json: a reply ends at <|im_end|>, a text at <|endoftext|>."""
    sampling = {"temperature": 0.3, "top_p": 0.9} if chat else {"temperature": 0.7, "top_p": 0.95}
    return {
        "bos_token_id": 0,
        "eos_token_id": [0, 2],
        "pad_token_id": 0,
        "do_sample": True,
        **sampling,
    }


def save_tokenizer(tokenizer_json: str, folder: Path, context: int) -> None:
    """Write tokenizer.json and tokenizer_config.json in the Hugging Face layout."""
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    config = json.dumps(tokenizer_config(context), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")
