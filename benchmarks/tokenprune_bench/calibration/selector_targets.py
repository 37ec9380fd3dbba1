# SPDX-License-Identifier: Apache-2.0
"""Observe a model for the fit of `learned`: visual tokens, answers, and the importance of each token."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tokenprune.api import patched
from tokenprune.errors import OptionError
from tokenprune.integrations.hf.families import get_adapter
from tokenprune.methods.selector import describe_question, describe_tokens
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens
from tokenprune_bench.calibration.attention_fitting import Looker, Lookers
from tokenprune_bench.calibration.rate_fitting import build_greedy_options

_LARGEST = 65504.0  # in float16
_TOP = 32  # tokens of each next-token distribution that the loss compares
_LOWEST = -20.0  # smallest attention bias
_TARGET = "target."  # prefix of a target's name in `ObservedPrompt.to_tensors`


@dataclass
class ObservedPrompt:
    """One prompt with its images, and the model's own answer.

    Attributes:
        inputs: Inputs of the scoring head, float16, shape (S, N, D + 4).
        question: Mean embedding of the text after each image, float32, shape (S, D).
        mask: Mask of visual tokens, bool, shape (S, N).
        position: Index of each visual token in the prompt, int64, shape (S, N).
        embeddings: Input of the decoder for prompt and answer, shape (1, L, D). None if no target needs it.
        position_ids: Position ids of prompt and answer, shape (..., L). None if the decoder counts the tokens.
        top: Most likely tokens of each step of the answer, int64, shape (steps, k).
        likely: Their probabilities, float32, shape (steps, k).
        targets: Share of each visual token in the image's importance, float32, shape (S, N), by target.
    """

    inputs: Tensor
    question: Tensor
    mask: Tensor
    position: Tensor
    embeddings: Tensor | None
    position_ids: Tensor | None
    top: Tensor
    likely: Tensor
    targets: dict[str, Tensor] = field(default_factory=dict)

    def has(self, target: str) -> bool:
        """Return True if the head can be fitted to `target` without another forward of the vision tower."""
        return self.embeddings is not None if target == "topk" else target in self.targets

    def get_rows(self) -> Tensor:
        """Return the inputs of all visual tokens, float32, shape (tokens, D + 4)."""
        return self.inputs[self.mask].float()

    def to(self, device: Any) -> ObservedPrompt:
        """Return a copy on `device`."""
        return ObservedPrompt.from_tensors({name: value.to(device) for name, value in self.to_tensors().items()})

    def to_tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        tensors = {part.name: getattr(self, part.name) for part in fields(self) if part.name != "targets"}
        targets = {_TARGET + name: value for name, value in self.targets.items()}
        return {name: value for name, value in tensors.items() if value is not None} | targets

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> ObservedPrompt:
        """Return the sample of `to_tensors`. Raises KeyError or TypeError for other tensors."""
        targets = {name.removeprefix(_TARGET): value for name, value in tensors.items() if name.startswith(_TARGET)}
        rest: dict[str, Any] = {name: value for name, value in tensors.items() if not name.startswith(_TARGET)}
        return cls(**{"embeddings": None, "position_ids": None} | rest, targets=targets)


@dataclass(frozen=True)
class _TokenRecorder(Pruner):
    """Record the visual tokens that enter the decoder, and keep them all."""

    name: ClassVar[str] = "recorder"
    site: ClassVar[Site] = Site.PRE_LLM
    chooses_count: ClassVar[bool] = True
    query_aware: ClassVar[bool] = True

    records: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list, compare=False)

    def select(self, tokens: VisualTokens) -> Selection:
        inputs = describe_tokens(tokens).clamp(-_LARGEST, _LARGEST).half()
        record = inputs, describe_question(tokens), tokens.mask, tokens.segments.position
        self.records.append(record)
        return Selection(tokens.mask, counts=tokens.counts)


@torch.no_grad()
def observe(
    model: Any, arguments: dict[str, Any], max_new_tokens: int, with_embeddings: bool = True
) -> ObservedPrompt | None:
    """Answer a prompt greedily and return the sample, without targets. None if the prompt lacks images.

    Args:
        model: The frozen model.
        arguments: Model arguments of one prompt.
        max_new_tokens: Maximum length of the answer.
        with_embeddings: Return the inputs of the decoder too.

    Raises:
        OptionError: If there are several prompts, or the decoder has inputs that a fit cannot repeat.
    """
    if len(arguments["input_ids"]) != 1:
        raise OptionError("A sample of the fit must be a single prompt. Pass samples with one row each.")
    recorder, calls = _TokenRecorder(), []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(kwargs)

    handle = get_adapter(model).decoder.register_forward_pre_hook(record, with_kwargs=True)
    try:
        with patched(model, recorder, keep=0.5, guard="off"):
            full = model.generate(**arguments, **build_greedy_options(max_new_tokens))
    finally:
        handle.remove()
    if not recorder.records:
        return None
    answer = full.sequences[:, full.sequences.shape[1] - len(full.logits) :]
    embeddings, position_ids = join_answer(model, calls[0], answer) if with_embeddings else (None, None)
    likely, top = torch.cat(full.logits).float().softmax(1).topk(min(_TOP, full.logits[0].shape[1]))
    likely = likely / likely.sum(1, keepdim=True)
    return ObservedPrompt(*recorder.records[0], embeddings, position_ids, top, likely)


def join_answer(model: Any, call: dict[str, Any], answer: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return embeddings and position ids of the prompt and all but the last token of the answer."""
    prompt, position_ids = _check_call(call)
    embeddings = torch.cat([prompt, model.get_input_embeddings()(answer[:, :-1]).to(prompt.dtype)], 1)
    if position_ids is not None:
        last = position_ids.amax(-1, keepdim=True)
        if last.ndim == 3:  # text continues behind the largest of the three M-RoPE axes, which may follow a text axis
            last[-3:] = last[-3:].amax(0, keepdim=True)
        position_ids = torch.cat([position_ids, last + torch.arange(1, answer.shape[1], device=last.device)], -1)
    return embeddings, position_ids


def _check_call(call: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Return embeddings and position ids of a decoder's call that a fit can repeat with a bias on attention."""
    known = ("inputs_embeds", "position_ids", "attention_mask", "past_key_values", "use_cache", "cache_position")
    other = [name for name, value in call.items() if name not in known and isinstance(value, (Tensor, list, tuple))]
    if other or isinstance(call.get("attention_mask"), dict) or call.get("inputs_embeds") is None:
        raise OptionError(
            f"This decoder takes {', '.join(other) or 'several attention masks'}, which a fit with gradients cannot "
            'repeat. Pass target="attention".'
        )
    return call["inputs_embeds"], call.get("position_ids")


def compute_loss(model: Any, sample: ObservedPrompt, bias: Tensor) -> Tensor:
    """Return the cross-entropy of the model's own answer if `bias` is added to the attention to each visual token.

    Args:
        model: The model, without gradients of its weights.
        sample: A sample.
        bias: Logarithm of the gate of each visual token, float32, shape (S, N).
    """
    assert sample.embeddings is not None  # see `ObservedPrompt.has`
    length, steps = sample.embeddings.shape[1], len(sample.top)
    flat = sample.mask.flatten()
    column = bias.new_zeros(length).index_put((sample.position.flatten()[flat],), bias.flatten()[flat])
    causal = torch.full((length, length), torch.finfo(torch.float32).min, device=bias.device).triu(1)
    # Each token attends to itself fully, so no row is empty.
    diagonal = torch.eye(length, dtype=torch.bool, device=bias.device)
    table = causal + column.clamp(min=_LOWEST).expand(length, -1).masked_fill(diagonal, 0)
    output = get_adapter(model).decoder(
        inputs_embeds=sample.embeddings,
        position_ids=sample.position_ids,
        attention_mask=table.to(sample.embeddings.dtype)[None, None],
        use_cache=False,
    )
    logits = model.get_output_embeddings()(output.last_hidden_state[0, -steps:])
    return -(sample.likely * logits.float().log_softmax(1).gather(1, sample.top)).sum(1).mean()


def measure(target: str, model: Any, arguments: dict[str, Any], sample: ObservedPrompt) -> Tensor:
    """Return the share of each visual token in the image's importance, float32, shape (S, N).

    Args:
        target: "attention" or "gradient".
        model: The frozen model.
        arguments: Model arguments of the prompt.
        sample: The observed prompt, on the model's device.
    """
    if target == "attention":
        return measure_attention(model, arguments, sample)
    return measure_gradient(model, sample)


@torch.no_grad()
def measure_attention(model: Any, arguments: dict[str, Any], sample: ObservedPrompt) -> Tensor:
    """Return the attention of the answer to each visual token, mean over heads and the middle half of the layers."""
    layers, start = len(get_adapter(model).decoder.layers), arguments["input_ids"].shape[1] - 1
    ids = torch.cat([arguments["input_ids"], sample.top[None, :-1, 0]], 1)
    prompt = {
        name: _extend(value, arguments["input_ids"].shape, len(sample.top) - 1, name)
        for name, value in arguments.items()
    }
    total = torch.zeros_like(sample.mask, dtype=torch.float32)

    def note(tokens: VisualTokens, _: int) -> None:
        rows = (tokens.text.mask & (tokens.text.position >= start)).float()
        total.add_(tokens.attention_from(rows / rows.sum(1, keepdim=True).clamp(min=1)).mean(1))

    observed = range(max(1, layers // 4), max(2, 3 * layers // 4))
    parts = tuple(Looker(layer, note, frozenset({"text_attention"})) for layer in observed)
    with patched(model, Lookers(parts), keep=0.5, guard="off"):
        model(**prompt | {"input_ids": ids}, use_cache=False)
    return _normalize(total, sample.mask)


def _extend(value: Any, shape: torch.Size, count: int, name: str) -> Any:
    """Extend a tensor with a value for each prompt token by `count` text tokens."""
    if not isinstance(value, Tensor) or value.shape != shape:
        return value
    return torch.cat([value, value.new_full((1, count), int(name == "attention_mask"))], 1)


def measure_gradient(model: Any, sample: ObservedPrompt) -> Tensor:
    """Return the size of the gradient of the answer's loss with respect to the gate of each visual token."""
    bias = torch.zeros(sample.mask.shape, device=sample.mask.device, requires_grad=True)
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(compute_loss(model, sample, bias), bias)
    return _normalize(gradient.abs(), sample.mask)


def _normalize(value: Tensor, mask: Tensor) -> Tensor:
    value = value.masked_fill(~mask, 0)
    return value / value.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)


def draw_gate(logit: Tensor, mask: Tensor, count: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Return the logarithm of random soft gates that sum to `count` in each image, float32, shape (S, N).

    A gate is the sigmoid of the token's logit plus logistic noise, minus a threshold (a concrete distribution).

    Args:
        logit: Logit of each token, shape (S, N).
        mask: Mask of tokens, bool, shape (S, N).
        count: Sum of the gates of each image, float32, shape (S, 1).
        temperature: Divisor of the noisy logits. Small values give gates near 0 or 1.
        generator: CPU generator of the noise.
    """
    uniform = torch.rand(logit.shape, generator=generator).clamp(1e-6, 1 - 1e-6).to(logit.device)
    noisy = ((logit + uniform.logit()) / temperature).masked_fill(~mask, -torch.inf)
    with torch.no_grad():
        low = noisy.masked_fill(~mask, torch.inf).amin(1, keepdim=True) - 20
        high = noisy.amax(1, keepdim=True) + 20
        for _ in range(40):
            middle = (low + high) / 2
            is_high = (noisy - middle).sigmoid().sum(1, keepdim=True) > count
            low, high = torch.where(is_high, middle, low), torch.where(is_high, high, middle)
    # One step of Newton's method gives the threshold its gradient.
    gate = (noisy - low).sigmoid()
    slope = (gate * (1 - gate)).sum(1, keepdim=True).detach().clamp(min=1e-6)
    threshold = low + (gate.sum(1, keepdim=True) - gate.sum(1, keepdim=True).detach()) / slope
    return torch.nn.functional.logsigmoid((noisy - threshold).masked_fill(~mask, -50.0))
