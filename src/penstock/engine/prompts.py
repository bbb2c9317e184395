"""What callers may give as a prompt, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from penstock.engine.options import RequestOptions
from penstock.errors import InvalidPromptError, InvalidSamplingError, TokenizerError, nearest
from penstock.models.vision.opening import open_pictures_of
from penstock.models.vision.pictures import Picture, Pictures
from penstock.sampling import CUTS, SUGGESTED, SamplingParams
from penstock.tokenizer import Tokenizer

Prompt = str | Sequence[Any] | Mapping[str, Any]

_KEYS = ("prompt", "prompt_token_ids", "multi_modal_data")
_MESSAGE = "{'role': 'user', 'content': '…'}"


def split(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt as a list of one; several as they are."""
    if isinstance(prompts, str | Mapping | Encoded):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        raise InvalidPromptError(
            f"Prompts are a text, a list of token ids, or a list of these, not "
            f"{type(prompts).__name__}."
        )
    items: list[Any] = list(prompts)
    if items and all(isinstance(x, int) for x in items):
        return [items]
    return items


class Encoded(NamedTuple):
    """A prompt that can be queued."""

    text: str | None
    tokens: Sequence[int]
    pictures: tuple[Picture, ...] = ()

    def options(self, given: RequestOptions | None) -> RequestOptions | None:
        """A request's options, with the pictures that its prompt has."""
        if not self.pictures or not isinstance(given, RequestOptions | None):
            return given
        return replace(given or RequestOptions(), pictures=self.pictures)


def encode(
    prompt: Prompt, tokenizer: Tokenizer | None, pictures: Pictures | None = None
) -> Encoded:
    """A prompt as tokens; one that is encoded already as it is. pictures: of a model that sees."""
    if isinstance(prompt, Encoded):
        return prompt
    if isinstance(prompt, Mapping):
        return _encode_mapping(prompt, tokenizer, pictures)
    if not isinstance(prompt, str):
        if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
            raise InvalidPromptError(
                f"A prompt must be a text or a list of token ids, not {type(prompt).__name__}."
            )
        tokens: Any = prompt
        return Encoded(None, tokens)
    if tokenizer is None:
        raise TokenizerError("A text prompt needs a tokenizer, but skip_tokenizer_init is set.")
    ids = tokenizer.encode(prompt)
    if not ids:
        raise InvalidPromptError(
            "The prompt is empty, and this model's tokenizer puts no token before a text. Give at "
            "least one character."
        )
    return Encoded(prompt, ids)


def _encode_mapping(
    prompt: Mapping[str, Any], tokenizer: Tokenizer | None, pictures: Pictures | None
) -> Encoded:
    unknown = [key for key in prompt if key not in _KEYS]
    if unknown or not {"prompt", "prompt_token_ids"} & prompt.keys():
        name = str(unknown[0]) if unknown else ""
        raise InvalidPromptError(
            f"A prompt dictionary takes prompt or prompt_token_ids, and multi_modal_data, not "
            f"{name!r}.{nearest(name, _KEYS)}"
        )
    given = prompt.get("multi_modal_data")
    found = () if given is None else _cut(_images(given), pictures)
    text = prompt.get("prompt")
    if "prompt_token_ids" in prompt:
        if text is not None and not isinstance(text, str):
            raise InvalidPromptError(
                "The prompt beside prompt_token_ids must be the text that they stand for, not "
                f"{type(text).__name__}. Leave it out, or pass a text."
            )
        tokens = prompt["prompt_token_ids"]
        if found and pictures is not None:
            tokens = _expanded(tokens, found, pictures, tokenizer)
        return Encoded(text, tokens, found)
    if found and pictures is not None:
        if not isinstance(text, str):
            raise InvalidPromptError(f"A prompt must be a text, not {type(text).__name__}.")
        text = pictures.expand(text, found)
    return encode(prompt["prompt"] if text is None else text, tokenizer)._replace(pictures=found)


def _images(given: Any) -> list[Any]:
    """What `multi_modal_data` holds, as vLLM's does: one image or several."""
    if not isinstance(given, Mapping) or set(given) != {"image"}:
        said = list(given) if isinstance(given, Mapping) else type(given).__name__
        raise InvalidPromptError(
            f"multi_modal_data must be {{'image': …}}, one image or a list of them, not {said}."
        )
    images = given["image"]
    return list(images) if isinstance(images, list | tuple) else [images]


def _cut(images: Sequence[Any], pictures: Pictures | None) -> tuple[Picture, ...]:
    """Images as the model takes them. Raises InvalidPromptError where it sees none."""
    if images and pictures is None:
        raise InvalidPromptError(
            f"This model sees no pictures, and {len(images)} are given. Leave them out, or load a "
            "model that does."
        )
    if pictures is None:
        return ()
    return tuple(pictures.cutter.cut(image) for image in open_pictures_of(images))


def _expanded(
    tokens: Any, found: Sequence[Picture], pictures: Pictures, tokenizer: Tokenizer | None
) -> Any:
    """Token ids with what stands for each picture, where one id does; else as they are."""
    written, of_rows = pictures.written_id, pictures.token_id
    if not isinstance(tokens, list | tuple) or tokens.count(written) != len(found):
        return tokens
    if written != of_rows and of_rows in tokens:
        return tokens
    if tokenizer is None:
        raise TokenizerError(
            "A picture's place is written by the tokenizer, but skip_tokenizer_init is set. Give "
            "as many placeholders as the picture has tokens."
        )
    ids: list[int] = []
    left = iter(found)
    for token in tokens:
        if token == written:
            ids += tokenizer.encode(next(left).text, add_special_tokens=False)
        else:
            ids.append(token)
    return ids


def split_chats(messages: Any) -> list[Any]:
    """One conversation as a list of one; several as they are."""
    _check_list(messages)
    several = messages and isinstance(messages[0], list | tuple)
    return list(messages) if several else [messages]


def encode_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    pictures: Pictures | None = None,
    **options: Any,
) -> Encoded:
    """A conversation through the chat template, which writes its own special tokens.

    pictures: of a model that sees some. A part of a message's content may be one: `image_url` as in
    OpenAI's API, or `image` with what `open_picture` opens.
    Raises InvalidPromptError for what a server would refuse too: templates write "None" for it, or
    nothing.
    """
    _check_messages(messages)
    images: list[Any] = []
    plain = [_seen(message, images) for message in messages]
    found = _cut(images, pictures)
    text = tokenizer.apply_chat_template(plain, **options)
    if found and pictures is not None:
        text = pictures.expand(text, found)
    return Encoded(text, tokenizer.encode(text, add_special_tokens=False), found)


_IMAGES = ("image_url", "image", "image_pil", "input_image")
_TEXTS = ("text", "input_text", "output_text")


def _seen(message: Mapping[str, Any], images: list[Any]) -> Mapping[str, Any]:
    """A message as templates read it, whose pictures go to `images`."""
    content = message["content"] if isinstance(message, Mapping) and "content" in message else None
    if not isinstance(content, list | tuple):
        return message
    parts = []
    for part in content:
        kind = _kind_of(part)
        if kind in _IMAGES:
            images.append(_image_of(part, kind))
            parts.append({"type": "image"})
        else:
            text = part if isinstance(part, str) else part["text"]
            parts.append({"type": "text", "text": text})
    return {**message, "content": parts}


def _kind_of(part: Any) -> str:
    """Of a part, which may leave its type to be seen, as vLLM's. Raises InvalidPromptError."""
    if isinstance(part, str):
        return "text"
    if not isinstance(part, Mapping):
        raise InvalidPromptError(
            "A part of a message must be a mapping such as {'type': 'text', 'text': '…'}, not "
            f"{type(part).__name__}."
        )
    kind = part.get("type", next((key for key in ("text", *_IMAGES) if key in part), None))
    if kind not in (*_TEXTS, *_IMAGES):
        raise InvalidPromptError(
            f"A part of a message is of type {kind!r:.60}; text, image and image_url are read."
        )
    if kind in _TEXTS and not isinstance(part.get("text"), str):
        raise InvalidPromptError(f"A part of type {kind!r} has no text: {sorted(part)}.")
    return str(kind)


def _image_of(part: Mapping[str, Any], kind: str) -> Any:
    given = part.get(kind, part.get("image_url"))
    if isinstance(given, Mapping):
        if given.get("detail", "auto") != "auto":
            raise InvalidPromptError(
                f"image_url has detail {given['detail']!r:.40}, which nothing here takes into "
                "account. Leave it out; mm_processor_kwargs says how pictures are cut."
            )
        given = given.get("url")
    if given is None:
        raise InvalidPromptError(f"A part of type {kind!r} has no {kind!r}: {sorted(part)}.")
    return given


def _check_list(messages: Any) -> None:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise InvalidPromptError(
            f"A conversation must be a list of messages such as {_MESSAGE}, not "
            f"{type(messages).__name__}."
        )


def _check_messages(messages: Any) -> None:
    from penstock.tokenizer.chat import plain_data  # and jinja2, a tenth of a second

    _check_list(messages)
    if not messages:
        raise InvalidPromptError("A conversation has 0 messages; at least 1 is needed.")
    for i, message in enumerate(messages):
        plain = plain_data(message)
        if not isinstance(plain, dict):
            raise InvalidPromptError(
                f"messages[{i}] must be a mapping such as {_MESSAGE}, not {type(message).__name__}."
            )
        role, content = plain.get("role"), plain.get("content")
        if not isinstance(role, str):
            said = f"has {role!r:.40} for its role" if "role" in plain else "has no role"
            raise InvalidPromptError(f"messages[{i}] {said}. Give one, such as in {_MESSAGE}.")
        if content is None and not plain.get("tool_calls"):
            raise InvalidPromptError(
                f"messages[{i}], of the {role:.40}, has no content. Give a text, if only ''."
            )
        if content is not None and not isinstance(content, str | list | tuple):
            raise InvalidPromptError(
                f"The content of messages[{i}], of the {role:.40}, must be a text or a list of "
                f"parts, not {type(content).__name__}."
            )


def check_chat(params: object) -> None:
    """Raises InvalidSamplingError for sampling parameters, one or several, of completions only."""
    for one in params if isinstance(params, list | tuple) else [params]:
        if isinstance(one, SamplingParams) and one.token_healing:
            raise InvalidSamplingError(
                "token_healing is of completions: a chat's prompt ends in its template's own "
                "tokens, none of which the answer changes. Leave it out, or use generate()."
            )


def default_params(generation: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters that `generation_config.json` suggests, vLLM's defaults otherwise.

    Raises InvalidSamplingError for values that can't be.
    """
    chosen = {k: generation[k] for k in SUGGESTED if generation.get(k) is not None}
    if generation.get("do_sample") is False:
        chosen = {k: v for k, v in chosen.items() if k not in CUTS} | {"temperature": 0.0}
    if generation.get("max_new_tokens"):
        chosen["max_tokens"] = generation["max_new_tokens"]
    try:
        return SamplingParams(**chosen)
    except InvalidSamplingError as error:
        raise InvalidSamplingError(
            f"The model's generation_config.json can't be followed: {error} Mend the file."
        ) from error
