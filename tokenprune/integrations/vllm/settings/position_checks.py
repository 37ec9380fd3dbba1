# SPDX-License-Identifier: Apache-2.0
"""Checks of positions in prompts; original positions in models with one axis of them: a check, and the changed config.

vLLM numbers the tokens that a prompt holds, and only a model with M-RoPE may set other positions. M-RoPE whose first
axis has all frequencies equals RoPE, so we declare a model with RoPE as one with such an M-RoPE.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenprune.errors import OptionError, UnsupportedSetupError
from tokenprune.integrations.vllm.settings.keys import KEY
from tokenprune.models.families import ROPE_DECODERS, Family
from tokenprune.settings import IN_LLM

_MARK = f"{KEY}_original_positions"
# vLLM's table of angles with M-RoPE, in lengths that the config names (`max_position_embeddings`).
_TABLE = 4
_ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_INSTEAD = "leave positions out, and kept tokens are counted anew"


def has_original_positions(model_config: Any) -> bool:
    """Return True if this model has one axis of positions and kept tokens keep those of the full prompt."""
    return getattr(model_config.multimodal_config, _MARK, False)


def count_positions(model_config: Any) -> int:
    """Return how many positions vLLM's table of angles has for a model with original positions."""
    return _TABLE * model_config.hf_text_config.max_position_embeddings


def configure_positions(positions: str | None, model_config: Any, family: Family, in_llm: bool) -> None:
    """Prepare the model's config for a server's `positions` (see `ServerConfig`). Only "original", in a model with one
    axis, changes it.

    Raises:
        UnsupportedSetupError: If original positions would not be exact.
        OptionError: If the model cannot renumber positions.
    """
    if family.vllm.mrope or in_llm:
        if positions == "renumbered":
            why = f"with {IN_LLM}" if in_llm else f"in {model_config.architecture}, which has M-RoPE"
            raise OptionError(f"{KEY}: kept tokens have their original positions {why}: leave positions out")
        return  # so they are
    if positions != "original":
        return
    if problems := list(_problems(model_config)):
        raise UnsupportedSetupError(
            f'{KEY}: "positions": "original" does not go with {model_config.architecture} here:\n- '
            + "\n- ".join(problems)
        )
    decoder = model_config.hf_text_config
    rope = dict(decoder.rope_parameters or {})
    turned = int(model_config.get_head_size() * rope.get("partial_rotary_factor", 1.0))
    decoder.rope_parameters = rope | {"mrope_section": [turned // 2, 0, 0]}
    setattr(model_config.multimodal_config, _MARK, True)


def _problems(model_config: Any) -> Iterator[str]:
    """Yield in words what would not be exact, and what to do instead."""
    decoder = model_config.hf_text_config
    if decoder.model_type not in ROPE_DECODERS:
        yield (
            f"of its language model, {decoder.model_type!r}, it is not known that it reads positions in rope alone (of "
            f"{', '.join(ROPE_DECODERS)} it is): {_INSTEAD}"
        )
        return
    rope = getattr(decoder, "rope_parameters", None) or {}
    if isinstance(rope.get("full_attention"), dict):
        yield f"its layers have different ropes: {_INSTEAD}"
    elif (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        yield f"its rope is scaled ({kind!r}), of which it is not known that vLLM does the same by axes: {_INSTEAD}"
    elif odd := sorted(set(rope) - _ROPE):
        yield f"its rope has {', '.join(odd)}: {_INSTEAD}"
    window, length = model_config.get_sliding_window(), model_config.max_model_len
    if window is not None and window < length:
        yield (
            f"its sliding window of {window} tokens counts those that are there, not their positions: start with "
            f"--max-model-len {window} or less, or {_INSTEAD}"
        )
    layers = set(getattr(decoder, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if layers:
        yield f"it has layers of other kinds ({', '.join(sorted(layers))}): {_INSTEAD}"
    for name in ("llama_4_scaling", "dual_chunk_attention_config"):
        if getattr(decoder, name, None) is not None:
            yield f"its attention uses positions in another way ({name}): {_INSTEAD}"


def check_placeholders(prompt: Sequence[int], items: Mapping[str, int], config: Any, reduces: bool) -> None:
    """Raise OptionError for a prompt whose placeholders do not tell positions. Those of kept tokens follow from the
    placeholders that it holds, counted from the text before them: there have to be no others, and there has to be some
    text. Those of the answer follow from the text after."""
    tokens = {"image": config.image_token_id, "video": config.video_token_id}
    for modality, token in tokens.items():
        found, wanted = prompt.count(token), items.get(modality, 0)
        if found > wanted:
            raise OptionError(
                f"the prompt holds {found} {modality} placeholders for {wanted} {modality}s; leave the others out"
            )
    if any(one in tokens.values() and other in tokens.values() for one, other in itertools.pairwise(prompt)):
        raise OptionError(
            "two images stand side by side without a token between them; put the model's start and end tags around "
            "each, as its chat template does"
        )
    if reduces and prompt[-1:] and prompt[-1] in tokens.values():
        raise OptionError(
            "the prompt ends with an image, so that nothing tells where its answer stands; put the model's end tag "
            "after it, as its chat template does"
        )
