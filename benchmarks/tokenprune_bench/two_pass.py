# SPDX-License-Identifier: Apache-2.0
"""Answer with few visual tokens first, and again with all tokens if the answer is uncertain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenprune.api import is_patched, patched, stats
from tokenprune.budgets import Budget
from tokenprune.errors import AlreadyPatchedError, OptionError
from tokenprune.integrations.hf.pixels.prompts import PromptReader
from tokenprune.methods.registry import build
from tokenprune.selection.method import Method, Site

# One of ten photographs (the scikit-image photos in test_dynres.py) has more detail on the scale of `dynres`.
_SHARP = 0.9
ESCALATE = "escalate"  # method name of escalation in benchmarks
_SHOWN = 60  # characters of an answer in its repr
_OURS = ("return_dict_in_generate", "output_logits")


@dataclass(frozen=True, eq=False, repr=False)
class Escalation:
    """Answer of `escalate` with its cost.

    Attributes:
        sequences: Prompt and answer ids of the accepted pass, int64, shape (1, length).
        text: The answer.
        passes: Number of runs of `generate`, 1 or 2.
        accepted: Whether the answer of the small pass is returned.
        margin: p1 - p2 of the small pass's first answer token. None without a small pass.
        entropy: Mean entropy of the small pass's answer tokens, in nats. None without a small pass.
        guard: "question" or "image" if the guard skipped the small pass, else None.
        visual_tokens: Visual tokens of each pass, averaged over the decoder's layers. Their sum is the cost.
        visual_tokens_full: Visual tokens at full size. None if that pass did not run and a method on pixels hides the
            number.
    """

    sequences: Tensor
    text: str
    passes: int
    accepted: bool
    margin: float | None
    entropy: float | None
    guard: str | None
    visual_tokens: tuple[float, ...]
    visual_tokens_full: float | None

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."
        spent = " + ".join(f"{tokens:.0f}" for tokens in self.visual_tokens)
        total = "" if self.visual_tokens_full is None else f" of {self.visual_tokens_full:.0f}"
        sure = "" if self.margin is None else f", margin={self.margin:.2f}"
        guard = "" if self.guard is None else f", guard={self.guard!r}"
        return f"Escalation({text!r}, passes={self.passes}{sure}{guard}, visual tokens: {spent}{total})"


@torch.no_grad()
def escalate(
    model: Any,
    processor: Any,
    *,
    images: Any,
    text: str,
    method: str | Method = "downsample",
    keep: float | int | Budget = 0.25,
    min_margin: float = 0.3,
    max_entropy: float = 1.0,
    guard: bool = True,
    **generate_kwargs: Any,
) -> Escalation:
    """Generate with `method` at `keep`, and generate again with the unpatched model if the answer is uncertain.

    The model is unpatched afterwards.

    Args:
        model: An unpatched model.
        processor: The model's processor.
        images: Images of one prompt, as the processor takes them.
        text: The prompt with placeholders (`apply_chat_template` with tokenize=False).
        method: Method of the first pass, a registered name or a configured method.
        keep: Keep of the first pass.
        min_margin: Accept the first pass if p1 - p2 of its first answer token is at least this value,
            and `max_entropy` holds. inf never accepts.
        max_entropy: Largest mean entropy of the answer tokens to accept, in nats. (0, inf) always accepts.
        guard: Start at full size if the question is about text, numbers or charts, or if an image contains text or is
            among the most detailed.
        generate_kwargs: Arguments of `generate` for both passes. Greedy decoding or sampling, one sequence.

    Raises:
        AlreadyPatchedError: If the model is patched.
        OptionError: If there are several prompts, a streamer (the first answer may be discarded), or beams.

    Examples:
        >>> content = [{"type": "image"}, {"type": "text", "text": "what color is the star?"}]
        >>> text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        >>> accept = {"min_margin": 0, "max_entropy": 9.0, "guard": False}
        >>> answer = escalate(model, processor, images=image, text=text, keep=0.25, **accept, max_new_tokens=2)
        >>> answer.passes
        1

    Source:
        Our design, similar to VisionThink (arXiv 2507.13348), which trains a model to request the larger image. This
        version is training-free. The thresholds are not calibrated.
    """
    from tokenprune.integrations.hf.families import get_adapter
    from tokenprune.integrations.hf.processor_check import check_processor
    from tokenprune.methods.pixels.dynres import asks_for_detail

    if not isinstance(text, str):
        raise OptionError(f"text must be a str, not {type(text).__name__}: escalate takes one prompt at a time.")
    _check(model, min_margin, max_entropy, generate_kwargs)
    check_processor(processor, get_adapter(model))
    pass_method = method if isinstance(method, Method) else build(method, {})
    reason = None
    if guard:
        question = PromptReader(processor, ESCALATE).prompt(text).question
        reason = "question" if asks_for_detail(question) else "image" if has_detailed_image(processor, images) else None

    margin = entropy = None
    tokens: list[float] = []
    if reason is None:
        pixels = {"processor": processor} if pass_method.site is Site.PRE_ENCODER else {}
        with patched(model, pass_method, keep=keep, guard="off", **pixels):
            output, length, _ = _answer(model, processor, images, text, generate_kwargs)
            pass_stats = stats(model)
        tokens.append(pass_stats.visual_tokens_average)
        margin, entropy = compute_certainty(output.logits)
        full = None if pixels else float(pass_stats.visual_tokens_in)
    accepted = margin is not None and entropy is not None and margin >= min_margin and entropy <= max_entropy
    if not accepted:
        output, length, full = _answer(model, processor, images, text, generate_kwargs)
        tokens.append(full)
    answer = processor.batch_decode(output.sequences[:, length:], skip_special_tokens=True)[0].strip()
    return Escalation(output.sequences, answer, len(tokens), accepted, margin, entropy, reason, tuple(tokens), full)


def _check(model: Any, min_margin: float, max_entropy: float, generate_kwargs: dict[str, Any]) -> None:
    if is_patched(model):
        raise AlreadyPatchedError(
            "The model is patched. Call tokenprune.unpatch(model): escalate patches it for its first pass."
        )
    for name, value in (("min_margin", min_margin), ("max_entropy", max_entropy)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            raise OptionError(f"{name}={value!r} must be a number >= 0.")
    if generate_kwargs.get("streamer") is not None:
        raise OptionError("escalate may discard its first answer, so it does not support streamer=.")
    settings = generate_kwargs.get("generation_config") or getattr(model, "generation_config", None)
    for name in ("num_beams", "num_return_sequences"):
        if (generate_kwargs.get(name) or getattr(settings, name, None) or 1) != 1:
            raise OptionError(f"escalate supports one sequence: {name} must be 1.")
    if reserved := [name for name in _OURS if name in generate_kwargs]:
        raise OptionError(f"escalate sets {reserved[0]} itself. Remove this argument.")


def _answer(
    model: Any, processor: Any, images: Any, text: str, generate_kwargs: dict[str, Any]
) -> tuple[Any, int, float]:
    """Return the output of one `generate`, the prompt's length, and its number of placeholders."""
    from tokenprune.integrations.hf.families import get_adapter

    inputs = processor(images=images, text=[text], return_tensors="pt").to(model.device, model.dtype)
    output = model.generate(**inputs, **generate_kwargs, return_dict_in_generate=True, output_logits=True)
    visual = sum(int(mask.sum()) for mask in get_adapter(model).visual_mask(inputs).values())
    return output, inputs["input_ids"].shape[1], float(visual)


def compute_certainty(logits: tuple[Tensor, ...]) -> tuple[float, float]:
    """Return p1 - p2 of the first token, and the mean entropy over tokens in nats.

    Args:
        logits: One (1, vocabulary) tensor per token.
    """
    odds = torch.cat(tuple(logits)).float().softmax(dim=-1)
    first, second = odds[0].topk(2).values.tolist()
    return first - second, float(torch.special.entr(odds).sum(dim=-1).mean())


def has_detailed_image(processor: Any, images: Any) -> bool:
    """Return True if an image looks like text, or has as much detail as the sharpest tenth of photographs."""
    from tokenprune.methods.pixels.dynres import measure_detail
    from tokenprune.models.processor_settings import get_image_processor
    from tokenprune.selection.images import InputImage, collect_images

    fetched = get_image_processor(processor).fetch_images(images)
    collected, _ = collect_images(fetched, lambda image, prompt, companions: InputImage(image))
    looks = [measure_detail(image.grey) for image in collected]
    return any(text or detail >= _SHARP for detail, text in looks)
