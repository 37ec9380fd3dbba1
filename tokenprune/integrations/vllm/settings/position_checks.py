# SPDX-License-Identifier: Apache-2.0
"""Checks of positions in prompts, and original positions for models with one position axis.

vLLM numbers the tokens of a prompt, and only a model with M-RoPE may set other positions. M-RoPE equals RoPE if its
first axis has all frequencies, so the config of a model with RoPE is changed to such an M-RoPE.
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
# Length of vLLM's rotary cache with M-RoPE, in multiples of `max_position_embeddings`.
_CACHE_FACTOR = 4
_ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_RENUMBER = "leave positions out to renumber the kept tokens"


def has_original_positions(model_config: Any) -> bool:
    """Return True if this model has one position axis and kept tokens keep their positions in the full prompt."""
    return getattr(model_config.multimodal_config, _MARK, False)


def count_positions(model_config: Any) -> int:
    """Return the length of vLLM's rotary cache for a model with original positions."""
    return _CACHE_FACTOR * model_config.hf_text_config.max_position_embeddings


def configure_positions(positions: str | None, model_config: Any, family: Family, in_llm: bool) -> None:
    """Prepare the model's config for a server's `positions`. Only "original" on a model with one axis changes it.

    Raises UnsupportedSetupError if original positions would not be exact, OptionError if the model cannot renumber.
    """
    if family.vllm.mrope or in_llm:
        if positions == "renumbered":
            why = f"with {IN_LLM}" if in_llm else f"in {model_config.architecture}, which has M-RoPE"
            raise OptionError(f"{KEY}: kept tokens always have their original positions {why}. Leave positions out.")
        return  # M-RoPE and methods inside the language model always keep original positions
    if positions != "original":
        return
    if problems := list(_iter_problems(model_config)):
        raise UnsupportedSetupError(
            f'{KEY}: "positions": "original" does not support {model_config.architecture} here:\n- '
            + "\n- ".join(problems)
        )
    decoder = model_config.hf_text_config
    rope = dict(decoder.rope_parameters or {})
    rotary_dim = int(model_config.get_head_size() * rope.get("partial_rotary_factor", 1.0))
    decoder.rope_parameters = rope | {"mrope_section": [rotary_dim // 2, 0, 0]}
    setattr(model_config.multimodal_config, _MARK, True)


def _iter_problems(model_config: Any) -> Iterator[str]:
    """Yield the reasons why original positions would not be exact, each with a remedy."""
    decoder = model_config.hf_text_config
    if decoder.model_type not in ROPE_DECODERS:
        yield (f"its language model {decoder.model_type!r} is not known to use positions only in RoPE: {_RENUMBER}")
        return
    rope = getattr(decoder, "rope_parameters", None) or {}
    if isinstance(rope.get("full_attention"), dict):
        yield f"its layers have different RoPE parameters: {_RENUMBER}"
    elif (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        yield f"its rope is scaled ({kind!r}), which vLLM may scale differently by axis: {_RENUMBER}"
    elif unknown := sorted(set(rope) - _ROPE):
        yield f"its rope has {', '.join(unknown)}: {_RENUMBER}"
    window, length = model_config.get_sliding_window(), model_config.max_model_len
    if window is not None and window < length:
        yield (
            f"its sliding window of {window} tokens counts tokens, not positions: start with "
            f"--max-model-len {window} or less, or {_RENUMBER}"
        )
    layers = set(getattr(decoder, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if layers:
        yield f"it has layers of other kinds ({', '.join(sorted(layers))}): {_RENUMBER}"
    for name in ("llama_4_scaling", "dual_chunk_attention_config"):
        if getattr(decoder, name, None) is not None:
            yield f"its attention uses positions in another way ({name}): {_RENUMBER}"


def check_placeholders(prompt: Sequence[int], items: Mapping[str, int], config: Any, reduces: bool) -> None:
    """Raise OptionError if the placeholders of a prompt do not determine positions.

    Positions of kept tokens are computed from the placeholders and the text before them. The prompt must therefore
    have no additional placeholders, and a token between two images. If the setting drops tokens (`reduces`), the prompt
    must not end with an image, because the position of the answer is computed from the text after it.
    """
    tokens = {"image": config.image_token_id, "video": config.video_token_id}
    for modality, token in tokens.items():
        count, expected = prompt.count(token), items.get(modality, 0)
        if count > expected:
            raise OptionError(
                f"the prompt has {count} {modality} placeholders for {expected} {modality}s; remove the others"
            )
    if any(a in tokens.values() and b in tokens.values() for a, b in itertools.pairwise(prompt)):
        raise OptionError(
            "two images follow each other without a token between them; put the model's start and end tags around "
            "each, as its chat template does"
        )
    if reduces and prompt[-1:] and prompt[-1] in tokens.values():
        raise OptionError(
            "the prompt ends with an image, so the position of the answer is unknown; put the model's end tag "
            "after it, as its chat template does"
        )
