# SPDX-License-Identifier: Apache-2.0
"""Detect a processor that belongs to another model. Its prompts would lack placeholders or have wrong token ids.

Only clear evidence counts, because processors of fine-tuned models and custom processors differ in harmless ways.
"""

from __future__ import annotations

import inspect
from typing import Any

from tokenprune.errors import OptionError
from tokenprune.integrations.hf.families import Adapter
from tokenprune.models.processor_settings import get_image_processor

# Names of the placeholder in processors of transformers. `image_token` is another token in Gemma 3 and Llama 4.
_IMAGE_TOKENS = ("image_token", "img_patch_token", "context_image_token")
_GRID = "image_grid_thw"


def check_processor(processor: Any, adapter: Adapter) -> None:
    """Raise OptionError if a processor, image processor or tokenizer belongs to another model.

    Three properties are compared: the id of the image token, the size of the vocabulary, and whether the patches of all
    images are packed into one tensor.
    """
    if processor is None:
        return
    model_type = adapter.config.model_type
    tokenizer = _find_tokenizer(processor)
    problem = (
        _compare_image_tokens(processor, tokenizer, adapter, model_type)
        or _compare_vocabularies(tokenizer, adapter, model_type)
        or _compare_image_inputs(processor, adapter, model_type)
    )
    if problem is not None:
        source = repr(getattr(adapter.config, "_name_or_path", "") or "folder of the model")
        raise OptionError(
            f"This {type(processor).__name__} is not the processor of the model: {problem}. "
            f"Pass AutoProcessor.from_pretrained({source})."
        )


def _find_tokenizer(processor: Any) -> Any:
    tokenizer = getattr(processor, "tokenizer", processor)
    return tokenizer if callable(getattr(tokenizer, "convert_tokens_to_ids", None)) else None


def _compare_image_tokens(processor: Any, tokenizer: Any, adapter: Adapter, model_type: str) -> str | None:
    expected = adapter.placeholders.get("image")
    ids = _get_image_token_ids(processor, tokenizer)
    if expected is None or not ids or expected in ids:
        return None
    return f"its image token has id {', '.join(map(str, sorted(ids)))}, and {model_type!r} expects id {expected}"


def _get_image_token_ids(processor: Any, tokenizer: Any) -> set[int]:
    """Return the ids of all tokens that may be the processor's image placeholder, empty if unknown."""
    names = [f"{name}_id" for name in _IMAGE_TOKENS]
    ids = {getattr(processor, name, None) for name in names}
    if tokenizer is not None and _is_from_transformers(processor):
        ids |= {_get_token_id(tokenizer, getattr(processor, name, None)) for name in _IMAGE_TOKENS}
    elif not any(type(token_id) is int for token_id in ids):
        return set()  # A custom processor may use a placeholder other than its `image_token`.
    ids |= {getattr(tokenizer, name, None) for name in names}
    return {token_id for token_id in ids if type(token_id) is int}


def _get_token_id(tokenizer: Any, token: Any) -> int | None:
    """Return the id of a token, or None if it is not in the vocabulary."""
    token_id = None if token is None else tokenizer.convert_tokens_to_ids(str(token))
    return None if token_id == tokenizer.unk_token_id else token_id


def _compare_vocabularies(tokenizer: Any, adapter: Adapter, model_type: str) -> str | None:
    # Added tokens are not counted: they may exceed the embeddings if no prompt uses them.
    tokens = getattr(tokenizer, "vocab_size", None)
    rows = getattr(adapter.text_config, "vocab_size", None)
    if type(tokens) is not int or type(rows) is not int or tokens <= rows:
        return None
    return f"its tokenizer has {tokens} tokens, and {model_type!r} has embeddings for {rows}"


def _compare_image_inputs(processor: Any, adapter: Adapter, model_type: str) -> str | None:
    image_processor = get_image_processor(processor)
    names = getattr(image_processor, "model_input_names", None)
    if not isinstance(names, (list, tuple)) or not callable(getattr(image_processor, "preprocess", None)):
        return None
    functions = (adapter.base.forward, getattr(adapter.base, "get_image_features", None))
    accepted = {name for function in functions if function for name in inspect.signature(function).parameters}
    kind = type(image_processor).__name__
    if _GRID in names and _GRID not in accepted:
        return f"a {kind} returns {_GRID}, which {model_type!r} does not take"
    # A custom image processor may return more names than it lists.
    if _GRID in accepted and _GRID not in names and _is_from_transformers(image_processor):
        return f"a {kind} returns no {_GRID}, which {model_type!r} needs"
    return None


def _is_from_transformers(processor: Any) -> bool:
    return any(cls.__module__.startswith("transformers.models.") for cls in type(processor).__mro__)
