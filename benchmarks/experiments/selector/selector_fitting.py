# SPDX-License-Identifier: Apache-2.0
"""Fit the scoring head of `learned` to a frozen model and its own answers, without labels."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from selector_head import Selector, compute_logits
from selector_targets import (
    Observation,
    Observations,
    compute_loss,
    draw_gate,
)
from torch import Tensor

from tokenprune.api import is_patched
from tokenprune.errors import AlreadyPatchedError, BudgetError, OptionError, TokenPruneError
from tokenprune.integrations.hf.families import get_adapter
from tokenprune.methods.encoder.thresholds import write_atomically
from tokenprune.models.fingerprint import compute_fingerprint
from tokenprune.selection.files import check_output

MAX_SHARE = 0.01  # of the model's parameters
_WIDTH, _RATE, _DECAY = 128, 2e-3, 0.01
_BATCH, _AVERAGE = 8, 0.99  # samples of a step; decay of the average of the weights
_SCALE_SAMPLES = 64  # samples that set mean and deviation of the inputs
_TEMPERATURE = 0.5
_SAVE_SECONDS = 20.0
_ENTRY = "tokenprune_selector_state"
Target = Literal["attention", "gradient", "topk"]


def fit_learned(
    model: Any,
    samples: Iterable[dict[str, Any]] | Observations,
    out: str | Path | None = None,
    *,
    keep: float | Sequence[float] = (0.25, 0.11),
    target: Target = "topk",
    use_question: bool = False,
    minutes: float = 60.0,
    epochs: int = 4,
    seed: int = 0,
    max_new_tokens: int = 24,
    restart: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Selector:
    """Fit the scoring head of `learned` to answers of the frozen model.

    Args:
        model: An unpatched model.
        samples: Model arguments of prompts with images, one prompt each, or observations of an earlier fit.
        out: File to write. An unfinished run is stored beside it (`.partial`), and the same call resumes it.
        keep: One share in (0, 1), or several. "topk" draws one of them for each sample.
        target: "attention" learns the attention of the answer to each visual token, "gradient" the size of the gradient
            of the answer's loss with respect to the token's gate, "topk" minimizes the loss under random soft gates.
        use_question: Let the head read the mean embedding of the question.
        minutes: Time limit. The fit is deterministic if it ends before.
        epochs: Passes over the samples.
        seed: Seed of the weights, the order of the samples and the gates.
        max_new_tokens: Maximum length of an answer.
        restart: Ignore an unfinished run.
        progress: Called with the number of finished samples.

    Returns:
        The fitted head.

    Raises:
        AlreadyPatchedError: If the model is patched.
        OptionError: If an option is not valid, or the file belongs to another fit.
        TokenPruneError: If no sample has an image.
    """
    if is_patched(model):
        raise AlreadyPatchedError("The model is patched. Call tokenprune.unpatch(model) before fitting.")
    observations = samples
    if not isinstance(samples, Observations):
        observations = Observations(
            model, samples if hasattr(samples, "__getitem__") else list(samples), max_new_tokens
        )
    fit = _Fit(observations, list(_check_keeps(keep)), target, use_question, seed, out)
    return fit.run(minutes, epochs, restart, progress)


def _check_keeps(keep: float | Sequence[float]) -> Sequence[float]:
    keeps = [keep] if isinstance(keep, float) else list(keep)
    for share in keeps:
        if isinstance(share, bool) or not isinstance(share, float) or not 0 < share < 1:
            raise BudgetError(f"keep={share!r} cannot be fitted. Pass a share between 0 and 1, such as 0.25.")
    if not keeps:
        raise BudgetError("keep is empty. Pass at least one share, such as 0.25.")
    return keeps


class _Fit:
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
        observations: Observations,
        keeps: list[float],
        target: Target,
        use_question: bool,
        seed: int,
        out: str | Path | None,
    ) -> None:
        self.observations, self.model = observations, observations.model
        self.keeps, self.target, self.use_question, self.seed = keeps, target, use_question, seed
        self.decoder = get_adapter(self.model).decoder
        self.out = None if out is None else Path(out)
        self.fingerprint = compute_fingerprint(self.decoder)
        self.weights: dict[str, Tensor] = {}
        self.average: dict[str, Tensor] = {}
        self.done = 0  # samples, over all epochs

    def run(self, minutes: float, epochs: int, restart: bool, progress: Callable[[int], None] | None) -> Selector:
        total = epochs * len(self.observations)
        self.identity = {
            "keeps": self.keeps, "target": self.target, "use_question": self.use_question, "seed": self.seed,
            "samples": len(self.observations), "model": self.fingerprint,
            "max_new_tokens": self.observations.max_new_tokens,
        }  # fmt: skip
        state = None if self.out is None else self.out.with_name(f"{self.out.name}.partial")
        if self.out is not None:
            check_output(self.out)
        training = self.model.training
        gradients = {name: value.requires_grad for name, value in self.model.named_parameters()}
        self.model.eval().requires_grad_(False)
        try:
            end = time.monotonic() + 60 * minutes
            self._start()
            if state is not None and state.exists() and not restart:
                self._load(state)
            saved = time.monotonic()
            while self.done < total and time.monotonic() < end:
                self._step()
                if progress is not None:
                    progress(self.done // epochs)
                if state is not None and time.monotonic() - saved > _SAVE_SECONDS:
                    self._save(state)
                    saved = time.monotonic()
        finally:
            self.model.train(training)
            for name, value in self.model.named_parameters():
                value.requires_grad_(gradients[name])
        selector = Selector({name: value.detach().clone() for name, value in self.average.items()}, self.fingerprint)
        if self.out is not None and state is not None:
            selector.save(self.out)
            if self.done >= total:
                state.unlink(missing_ok=True)
            else:
                self._save(state)
        return selector

    def _start(self) -> None:
        """Create the weights. The first samples set mean and deviation of the inputs."""
        first = [
            self.observations.get(index, self.target) for index in range(min(_SCALE_SAMPLES, len(self.observations)))
        ]
        known = [sample for sample in first if sample is not None]
        if not known:
            raise TokenPruneError("Cannot fit: no sample has an image.")
        inputs = torch.cat([sample.inputs[sample.mask].float() for sample in known])
        question = torch.cat([sample.question for sample in known])
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        per_unit = inputs.shape[1] + 2 + self.use_question * question.shape[1]
        rest = 2 * inputs.shape[1] + 2 * self.use_question * question.shape[1]
        width = min(_WIDTH, max(1, (int(MAX_SHARE * parameters) - rest) // per_unit))
        generator = torch.Generator("cpu").manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=generator, dtype=torch.float32) / shape[-1] ** 0.5).to(inputs.device)

        self.weights = {
            "mean": inputs.mean(0), "std": inputs.std(0) + 1e-3, "hidden_weight": draw(width, inputs.shape[1]),
            "hidden_bias": torch.zeros(width, device=inputs.device), "out_weight": draw(width),
        }  # fmt: skip
        if self.use_question:
            self.weights |= {
                "question_mean": question.mean(0), "question_std": question.std(0, correction=0) + 1e-3,
                "question_weight": draw(width, question.shape[1]),
            }  # fmt: skip
        self.trained = [name for name in self.weights if not name.endswith(("mean", "std"))]
        for name in self.trained:
            self.weights[name].requires_grad_()
        self.average = {name: value.detach().clone() for name, value in self.weights.items()}
        self.optimizer = torch.optim.AdamW([self.weights[name] for name in self.trained], _RATE, weight_decay=_DECAY)

    def _step(self) -> None:
        """Update the weights with the next batch of samples."""
        count = len(self.observations)
        batch = range(self.done, min(self.done + _BATCH, (self.done // count + 1) * count))
        self.optimizer.zero_grad()
        for step in batch:
            epoch, index = divmod(step, count)
            order = torch.randperm(count, generator=torch.Generator("cpu").manual_seed(self.seed * 1009 + epoch))
            sample = self.observations.get(int(order[index]), self.target)
            if sample is not None:
                with torch.enable_grad():
                    (self._loss(sample, step) / len(batch)).backward()
        self.optimizer.step()
        self.done = batch.stop
        decay = min(_AVERAGE, self.done / (self.done + 10 * _BATCH))
        for name in self.trained:
            self.average[name].lerp_(self.weights[name].detach(), 1 - decay)

    def _loss(self, sample: Observation, step: int) -> Tensor:
        logit = compute_logits(self.weights, sample.inputs.float(), sample.question if self.use_question else None)
        if self.target != "topk":
            likely = logit.masked_fill(~sample.mask, -1e4).log_softmax(1)
            return -(sample.targets[self.target] * likely).sum(1).mean()
        generator = torch.Generator("cpu").manual_seed(self.seed * 1_000_003 + step)
        share = self.keeps[int(torch.randint(len(self.keeps), (), generator=generator))]
        count = (share * sample.mask.sum(1, keepdim=True)).clamp(min=1)
        gate = draw_gate(logit, sample.mask, count, _TEMPERATURE, generator)
        return compute_loss(self.model, sample, gate)

    def _save(self, path: Path) -> None:
        tensors = {f"weights.{name}": value.detach() for name, value in self.weights.items()}
        tensors |= {f"average.{name}": value for name, value in self.average.items()}
        for index, values in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value for name, value in values.items()}
        tensors = {name: value.contiguous().cpu() for name, value in tensors.items()}
        about = {"same": self.identity, "done": self.done}
        write_atomically(path, save(tensors, {_ENTRY: json.dumps(about)}))

    def _load(self, path: Path) -> None:
        remedy = "Delete it, or pass restart=True."
        try:
            with safe_open(str(path), "pt") as file:
                about = json.loads(file.metadata()[_ENTRY])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise OptionError(f"{path} is not a readable state of a fit. {remedy}") from error
        other = [name for name, value in self.identity.items() if about["same"].get(name) != value]
        if other:
            raise OptionError(f"{path} belongs to a fit with other {', '.join(other)}. {remedy}")
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
