# SPDX-License-Identifier: Apache-2.0
"""Training of the scoring head of `learned`: observe samples, update the weights, and store the state."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tokenprune.errors import OptionError, TokenPruneError
from tokenprune.integrations.hf.families import get_adapter
from tokenprune.methods.selector import Selector, compute_logits
from tokenprune.models.fingerprint import compute_fingerprint
from tokenprune.selection.files import write_atomically
from tokenprune_bench.calibration.selector_observations import ObservedPrompts, check_identity
from tokenprune_bench.calibration.selector_targets import ObservedPrompt, compute_loss, draw_gate

MAX_SHARE = 0.01  # of the model's parameters
_WIDTH, _RATE, _DECAY = 128, 2e-3, 0.01
_BATCH, _AVERAGE = 8, 0.99  # samples of a step; decay of the average of the weights
_SCALE_SAMPLES = 64  # samples that set mean and deviation of the inputs
_TEMPERATURE = 0.5
_SAVE_SECONDS = 20.0
_ENTRY = "tokenprune_selector_state"
Target = Literal["attention", "gradient", "topk"]
# Share of the time that may pass before the first step, and time of a step relative to an observation.
_OBSERVE = {"attention": (0.8, 0.02), "gradient": (0.8, 0.02), "topk": (0.3, 1.0)}


@dataclass
class SelectorFit:
    """Statistics of a fit.

    Attributes:
        num_samples: Samples with an image that the head was fitted to.
        num_offered: Samples that were passed.
        passes: Finished passes over the samples.
        is_finished: False if the time ended before.
        target: Target of the fit.
        covered: Share of the answers' attention (or gradient) in the tokens with the highest scores, by `keep`, mean
            over the samples. Empty for the target "topk".
    """

    num_samples: int
    num_offered: int
    passes: float
    is_finished: bool
    target: str
    covered: dict[float, float]

    def __str__(self) -> str:
        lines = [f"fitted to {self.num_samples} of {self.num_offered} samples, {self.passes:.3g} passes"]
        if not self.is_finished:
            lines.append("The time is up. The same command continues the fit.")
        for keep, share in self.covered.items():
            lines.append(f"the best {keep:.0%} of the tokens hold {share:.0%} of the answers' {self.target}")
        return "\n".join(lines)


class FittedSelector(NamedTuple):
    """The scoring head of `fit_learned`, and the statistics of the fit."""

    selector: Selector
    fit: SelectorFit

    def __str__(self) -> str:
        return f"{self.selector}\n{self.fit}"


def _scale(read: Callable[[int], Tensor], indices: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of the rows of several samples, with one sample in memory."""
    count = sum(len(read(index)) for index in indices)
    mean = torch.stack([read(index).sum(0) / count for index in indices]).sum(0)
    variance = torch.stack([(read(index) - mean).square().sum(0) / count for index in indices]).sum(0)
    return mean, variance.sqrt() + 1e-3


@contextmanager
def _frozen(model: Any) -> Iterator[None]:
    """Evaluate the model without gradients of its weights."""
    training = model.training
    gradients = {name: value.requires_grad for name, value in model.named_parameters()}
    model.eval().requires_grad_(False)
    try:
        yield
    finally:
        model.train(training)
        for name, value in model.named_parameters():
            value.requires_grad_(gradients[name])


class SelectorTraining:
    """A running fit: the weights, their average, the optimizer, and the samples that were observed.

    Args:
        observations: The samples.
        keeps: Shares to fit to.
        target: See `fit_learned`.
        use_question: See `fit_learned`.
        seed: See `fit_learned`.
        out: File of the result.
    """

    def __init__(
        self,
        observations: ObservedPrompts,
        keeps: list[float],
        target: Target,
        use_question: bool,
        seed: int,
        out: Path | None,
    ) -> None:
        self.observations, self.model = observations, observations.model
        self.keeps, self.target, self.use_question, self.seed = keeps, target, use_question, seed
        self.out = out
        self.state = None if out is None else out.with_name(f"{out.name}.partial")
        self.fingerprint = compute_fingerprint(get_adapter(self.model).decoder)
        self.indices: list[int] = []  # samples with an image
        self.weights: dict[str, Tensor] = {}
        self.average: dict[str, Tensor] = {}
        self.done = 0  # steps of one sample, over all epochs

    def run(self, minutes: float, epochs: int, restart: bool, progress: Callable[[int], None] | None) -> FittedSelector:
        share, cost = _OBSERVE[self.target]
        start, offered = time.monotonic(), len(self.observations)
        observed = {"model": self.fingerprint, "max_new_tokens": self.observations.max_new_tokens}
        if self.observations.digest is None:
            observed["samples"] = offered
        self.identity = observed | {
            "keeps": self.keeps, "target": self.target, "use_question": self.use_question, "seed": self.seed
        }  # fmt: skip
        if restart and self.state is not None:
            self.state.unlink(missing_ok=True)
        stored = self._read_state()
        self.observations.open(observed, restart)
        work = 1 + cost * epochs  # relative to the observation of all samples

        def report(count: float) -> None:
            if progress is not None:
                progress(min(offered, int(count / work)))

        with _frozen(self.model):
            self._observe(start + 60 * minutes * share, report)
            self._start()
            self._restore(*stored)
            total, saved = epochs * len(self.indices), time.monotonic()
            while self.done < total and time.monotonic() < start + 60 * minutes:
                self._step()
                report(offered + cost * self.done * offered / len(self.indices))
                if time.monotonic() - saved > _SAVE_SECONDS:
                    self._save()
                    saved = time.monotonic()
            report(work * offered)
            is_finished = self.done >= total and self.num_observed == offered
            passes = self.done / len(self.indices)
            fit = SelectorFit(len(self.indices), offered, passes, is_finished, self.target, self._cover())
        selector = Selector({name: value.detach().clone() for name, value in self.average.items()}, self.fingerprint)
        if self.out is not None and self.state is not None:
            selector.save(self.out)
            self._save()
            if is_finished:
                self.state.unlink()
                self.observations.remove()
        return FittedSelector(selector, fit)

    def _observe(self, end: float, report: Callable[[float], None]) -> None:
        """Observe the samples in order until `end`, but at least one with an image."""
        for index in range(len(self.observations)):
            if self.indices and time.monotonic() > end:
                break
            if self.observations.get(index, self.target) is not None:
                self.indices.append(index)
            self.num_observed = index + 1
            report(self.num_observed)
        if not self.indices:
            self.observations.remove()
            raise TokenPruneError("Cannot fit: no sample has an image.")

    def _get(self, index: int) -> ObservedPrompt:
        sample = self.observations.get(self.indices[index], self.target)
        assert sample is not None  # see `_observe`
        return sample

    def _start(self) -> None:
        """Create the weights. The first samples set mean and deviation of the inputs."""
        first = range(min(_SCALE_SAMPLES, len(self.indices)))
        mean, std = _scale(lambda index: self._get(index).get_rows(), first)
        question_mean, question_std = _scale(lambda index: self._get(index).question, first)
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        inputs, questions = len(mean), self.use_question * len(question_mean)
        width = (int(MAX_SHARE * parameters) - 2 * inputs - 2 * questions) // (inputs + 2 + questions)
        width = min(_WIDTH, max(1, width))
        generator = torch.Generator("cpu").manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=generator, dtype=torch.float32) / shape[-1] ** 0.5).to(mean.device)

        self.weights = {
            "mean": mean, "std": std, "hidden_weight": draw(width, inputs),
            "hidden_bias": torch.zeros(width, device=mean.device), "out_weight": draw(width),
        }  # fmt: skip
        if self.use_question:
            self.weights |= {
                "question_mean": question_mean, "question_std": question_std, "question_weight": draw(width, questions)
            }  # fmt: skip
        self.trained = [name for name in self.weights if not name.endswith(("mean", "std"))]
        for name in self.trained:
            self.weights[name].requires_grad_()
        self.average = {name: value.detach().clone() for name, value in self.weights.items()}
        self.optimizer = torch.optim.AdamW([self.weights[name] for name in self.trained], _RATE, weight_decay=_DECAY)

    def _step(self) -> None:
        """Update the weights with the next batch of samples."""
        count = len(self.indices)
        batch = range(self.done, min(self.done + _BATCH, (self.done // count + 1) * count))
        self.optimizer.zero_grad()
        for step in batch:
            epoch, index = divmod(step, count)
            order = torch.randperm(count, generator=torch.Generator("cpu").manual_seed(self.seed * 1009 + epoch))
            with torch.enable_grad():
                (self._compute_sample_loss(self._get(int(order[index])), step) / len(batch)).backward()
        self.optimizer.step()
        self.done = batch.stop
        decay = min(_AVERAGE, self.done / (self.done + 10 * _BATCH))
        for name in self.trained:
            self.average[name].lerp_(self.weights[name].detach(), 1 - decay)

    def _compute_logits(self, weights: dict[str, Tensor], sample: ObservedPrompt) -> Tensor:
        return compute_logits(weights, sample.inputs.float(), sample.question if self.use_question else None)

    def _compute_sample_loss(self, sample: ObservedPrompt, step: int) -> Tensor:
        logit = self._compute_logits(self.weights, sample)
        if self.target != "topk":
            likely = logit.masked_fill(~sample.mask, -1e4).log_softmax(1)
            return -(sample.targets[self.target] * likely).sum(1).mean()
        generator = torch.Generator("cpu").manual_seed(self.seed * 1_000_003 + step)
        share = self.keeps[int(torch.randint(len(self.keeps), (), generator=generator))]
        count = (share * sample.mask.sum(1, keepdim=True)).clamp(min=1)
        gate = draw_gate(logit, sample.mask, count, _TEMPERATURE, generator)
        return compute_loss(self.model, sample, gate)

    def _cover(self) -> dict[float, float]:
        """Return the share of the importance that the tokens with the highest scores hold, by `keep`."""
        if self.target == "topk":
            return {}
        sums = dict.fromkeys(self.keeps, 0.0)
        for index in range(len(self.indices)):
            sample = self._get(index)
            order = self._compute_logits(self.average, sample).masked_fill(~sample.mask, -torch.inf).argsort(1)
            counts = sample.mask.sum(1, keepdim=True)
            ranks = sample.mask.shape[1] - 1 - order.argsort(1)  # 0 for the highest score
            for keep in self.keeps:
                is_kept = ranks < (keep * counts).round().clamp(min=1)
                sums[keep] += float((sample.targets[self.target] * is_kept).sum(1).mean())
        return {keep: total / len(self.indices) for keep, total in sums.items()}

    def _save(self) -> None:
        if self.state is None:
            return
        tensors = {f"weights.{name}": value.detach() for name, value in self.weights.items()}
        tensors |= {f"average.{name}": value for name, value in self.average.items()}
        for index, values in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value for name, value in values.items()}
        tensors = {name: value.contiguous().cpu() for name, value in tensors.items()}
        about = {
            "same": self.identity,
            "done": self.done,
            "fitted": len(self.indices),
            "data": self.observations.digest,
        }
        write_atomically(self.state, save(tensors, {_ENTRY: json.dumps(about)}))

    def _read_state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return numbers and tensors of the stored state, both empty if there is none."""
        if self.state is None or not self.state.exists():
            return {}, {}
        try:
            with safe_open(str(self.state), "pt") as file:
                about = json.loads(file.metadata()[_ENTRY])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            same = about["same"]
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise OptionError(
                f"{self.state} is not a readable state of a fit. Delete it, or pass restart=True (--restart)."
            ) from error
        check_identity(self.state, same, self.identity)
        return about, tensors

    def _restore(self, about: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Continue from a stored state. With other or additional samples, training starts again."""
        fitted, data = about.get("fitted", len(self.indices)), about.get("data")
        if not about or fitted != len(self.indices) or data != self.observations.digest:
            return
        self.done = about["done"]
        for name in self.weights:
            self.weights[name].data.copy_(tensors[f"weights.{name}"])
            self.average[name].copy_(tensors[f"average.{name}"])
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "optimizer":
                index, _, field = rest.partition(".")
                state.setdefault(int(index), {})[field] = value
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state})
