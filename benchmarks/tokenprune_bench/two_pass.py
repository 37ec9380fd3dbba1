# SPDX-License-Identifier: Apache-2.0
"""escalate: answer with few visual tokens first, and again with all of them where that answer is unsure."""

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

# Of ten photographs (those of scikit-image that test_dynres.py takes), one has more detail, on the scale of `dynres`.
_SHARP = 0.9
ESCALATE = "escalate"  # the name of this in a benchmark, where a method has its own
_SHOWN = 60  # characters of an answer in its repr
_OURS = ("return_dict_in_generate", "output_logits")


@dataclass(frozen=True, eq=False, repr=False)
class Escalation:
    """The answer of `escalate`, and what it took.

    sequences:     long `[1, length]`: prompt and answer, as `generate` returns them for the pass that counted.
    text:          the answer.
    passes:        1 or 2 runs of `generate`.
    accepted:      whether the answer of the small pass is the one returned.
    margin:        p1 - p2 of the small pass's first answer token; None if there was no small pass.
    entropy:       mean entropy of its answer tokens, in nats; None likewise.
    guard:         "question" or "image" if that sent the prompt to the full size at once, else None.
    visual_tokens: of each pass, averaged over the decoder's layers. Their sum is the cost; the full size alone would
                   have cost `visual_tokens_full`, None where it was not run and a method on pixels hides it.
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
        """Return what a reader wants to know; the token ids are in `sequences`."""
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."
        spent = " + ".join(f"{tokens:.0f}" for tokens in self.visual_tokens)
        of = "" if self.visual_tokens_full is None else f" of {self.visual_tokens_full:.0f}"
        sure = "" if self.margin is None else f", margin={self.margin:.2f}"
        guard = "" if self.guard is None else f", guard={self.guard!r}"
        return f"Escalation({text!r}, passes={self.passes}{sure}{guard}, visual tokens: {spent}{of})"


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
    """Generate with `method` at `keep`; where that answer is unsure, generate again with the unpatched model.

    images, text:     the images of one prompt, and the prompt with their placeholders (`apply_chat_template` with
                      tokenize=False), as the processor takes them.
    method, keep:     of the first pass; any registered name or configured method.
    min_margin:       accept the first pass if p1 - p2 of its first answer token is at least this,
    max_entropy:      and the mean entropy of its answer tokens at most this, in nats. (0, inf) always accepts; a margin
                      of inf never does.
    guard:            start at full size where the question is about text, numbers or charts, or an image holds text or
                      is among the most detailed.
    generate_kwargs:  for both passes; greedy decoding and sampling, one sequence.

    The model is left unpatched. Raises AlreadyPatchedError for a patched model, OptionError for several prompts, a
    streamer (an answer may be withdrawn) and beams, and whatever `patch` raises.

    Source: our decision, in the spirit of VisionThink (arXiv 2507.13348), which trains a model to ask for the larger
    image; this is training-free. The thresholds are a choice, not a calibration.
    """
    from tokenprune.integrations.hf.families import adapter_for
    from tokenprune.integrations.hf.processor_check import check_processor
    from tokenprune.methods.pixels.dynres import asks_for_detail

    if not isinstance(text, str):
        raise OptionError(f"escalate takes one prompt at a time: text must be a str, not {type(text).__name__}")
    _check(model, min_margin, max_entropy, generate_kwargs)
    check_processor(processor, adapter_for(model))
    one = method if isinstance(method, Method) else build(method, {})
    reason = None
    if guard:
        question = PromptReader(processor, ESCALATE).prompt(text).question
        reason = "question" if asks_for_detail(question) else "image" if any_detailed(processor, images) else None

    margin = entropy = None
    tokens: list[float] = []
    if reason is None:
        pixels = {"processor": processor} if one.site is Site.PRE_ENCODER else {}
        with patched(model, one, keep=keep, guard="off", **pixels):
            output, length, _ = _answer(model, processor, images, text, generate_kwargs)
            seen = stats(model)
        tokens.append(seen.visual_tokens_average)
        margin, entropy = certainty(output.logits)
        full = None if pixels else float(seen.visual_tokens_in)
    accepted = margin is not None and entropy is not None and margin >= min_margin and entropy <= max_entropy
    if not accepted:
        output, length, full = _answer(model, processor, images, text, generate_kwargs)
        tokens.append(full)
    answer = processor.batch_decode(output.sequences[:, length:], skip_special_tokens=True)[0].strip()
    return Escalation(output.sequences, answer, len(tokens), accepted, margin, entropy, reason, tuple(tokens), full)


def _check(model: Any, min_margin: float, max_entropy: float, generate_kwargs: dict[str, Any]) -> None:
    if is_patched(model):
        raise AlreadyPatchedError("escalate patches the model for its first pass itself: call tokenprune.unpatch first")
    for name, value in (("min_margin", min_margin), ("max_entropy", max_entropy)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            raise OptionError(f"{name}={value!r} must be a number >= 0")
    if generate_kwargs.get("streamer") is not None:
        raise OptionError("escalate may withdraw its first answer, so it cannot stream one: leave out streamer=")
    settings = generate_kwargs.get("generation_config") or getattr(model, "generation_config", None)
    for name in ("num_beams", "num_return_sequences"):
        if (generate_kwargs.get(name) or getattr(settings, name, None) or 1) != 1:
            raise OptionError(f"escalate looks at the tokens of one sequence: {name} must be 1")
    if given := [name for name in _OURS if name in generate_kwargs]:
        raise OptionError(f"escalate sets {given[0]} itself: leave it out")


def _answer(
    model: Any, processor: Any, images: Any, text: str, generate_kwargs: dict[str, Any]
) -> tuple[Any, int, float]:
    """Return the output of one `generate`, the prompt's length, and its placeholders."""
    from tokenprune.integrations.hf.families import adapter_for

    inputs = processor(images=images, text=[text], return_tensors="pt").to(model.device, model.dtype)
    output = model.generate(**inputs, **generate_kwargs, return_dict_in_generate=True, output_logits=True)
    visual = sum(int(mask.sum()) for mask in adapter_for(model).visual_mask(inputs).values())
    return output, inputs["input_ids"].shape[1], float(visual)


def certainty(logits: tuple[Tensor, ...]) -> tuple[float, float]:
    """Return p1 - p2 of the first token, and the mean entropy over tokens in nats. logits: `[1, V]` for each token."""
    odds = torch.cat(tuple(logits)).float().softmax(dim=-1)
    first, second = odds[0].topk(2).values.tolist()
    return first - second, float(torch.special.entr(odds).sum(dim=-1).mean())


def any_detailed(processor: Any, images: Any) -> bool:
    """Return True if one of the images looks like text, or has as much detail as the sharpest tenth of photographs."""
    from tokenprune.methods.pixels.dynres import measure_detail
    from tokenprune.models.token_counts import image_processor_of
    from tokenprune.selection.images import InputImage, collect

    given = image_processor_of(processor).fetch_images(images)
    found, _ = collect(given, lambda image, prompt, companions: InputImage(image))
    looks = [measure_detail(one.grey) for one in found]
    return any(text or detail >= _SHARP for detail, text in looks)
