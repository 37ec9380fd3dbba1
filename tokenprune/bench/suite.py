# SPDX-License-Identifier: Apache-2.0
"""The benchmark: every method at every keep on the held-out questions, as plain records that JSON can hold.

A run yields a header, one record for the unpatched model, and one for each (method, keep): either a "result", or
"skipped" with the reason. Tables, marks and plots are made from the records alone (results.py), at any time.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import tokenprune
from tokenprune.bench.heldout import Example, load_heldout
from tokenprune.bench.model import Subject
from tokenprune.bench.results import MARKS, SCHEMA, UNPATCHED
from tokenprune.bench.scenes import KINDS
from tokenprune.bench.timing import compare
from tokenprune.errors import OptionError, TokenPruneError, UnsupportedSetupError
from tokenprune.registry import method_class

BASELINES = tuple(MARKS)
DEFAULT_KEEPS = (0.5, 0.25, 0.11)
DEFAULT_PICTURES = 24
Step = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Plan:
    """What to run. The baselines are put in front of `methods`; () means all registered ones that choose within a
    picture.

    pictures: how many held-out pictures, each with one question of every kind; 0: all. seeds: methods that draw at
    random (that have an option `seed`) answer once with each. repeats: timed runs of each (method, keep); 0: no timing.
    """

    methods: tuple[str, ...] = ()
    keeps: tuple[float | int, ...] = DEFAULT_KEEPS
    pictures: int = DEFAULT_PICTURES
    batch_size: int = 32
    seeds: tuple[int, ...] = (0, 1, 2)
    repeats: int = 7

    def __post_init__(self) -> None:
        # Every question here has one picture, so that nothing is left to a method that chooses between pictures.
        fitting = (name for name in tokenprune.available_methods() if not method_class(name).chooses_pictures)
        names = self.methods or tuple(fitting)
        for name in names:
            method_class(name)  # raises with close matches
        ordered = tuple(dict.fromkeys((*BASELINES, *names)))
        object.__setattr__(self, "methods", ordered)
        for keep in self.keeps:
            tokenprune.Budget.of(keep)
        for name, low in (("pictures", 0), ("batch_size", 1), ("repeats", 0)):
            if getattr(self, name) < low:
                raise OptionError(f"{name} must be at least {low}, not {getattr(self, name)}")
        if not self.keeps or not self.seeds:
            raise OptionError("a benchmark needs at least one keep and one seed")


@dataclass
class Cost:
    """`Stats`, summed over the batches of one pass (overhead_ms too); flops: of the decoder in prefill."""

    visual_tokens_in: int = 0
    visual_tokens_out: int = 0
    visual_tokens_per_layer: list[int] = field(default_factory=list)
    flops: float = 0.0
    kv_bytes: int = 0
    kv_bytes_full: int = 0
    overhead_ms: float = 0.0

    def add(self, subject: Subject, inputs: dict[str, Any], kv_bytes: int | None = None) -> None:
        """Add the batch that just ran. kv_bytes: what its cache held after prefill, if the model was not patched."""
        rows, length = inputs["input_ids"].shape
        full = rows * subject.shape.prefill_flops([length] * subject.shape.layers)
        if kv_bytes is None:
            stats = tokenprune.stats(subject.model)
        else:
            visual = subject.visual_tokens(inputs)
            per_layer = [visual] * subject.shape.layers
            stats = tokenprune.Stats(visual, visual, per_layer, kv_bytes=kv_bytes, kv_bytes_full=kv_bytes)
        for name in ("visual_tokens_in", "visual_tokens_out", "kv_bytes", "kv_bytes_full", "overhead_ms"):
            setattr(self, name, getattr(self, name) + getattr(stats, name))
        before = self.visual_tokens_per_layer or [0] * len(stats.visual_tokens_per_layer)
        self.visual_tokens_per_layer = [a + b for a, b in zip(before, stats.visual_tokens_per_layer, strict=True)]
        self.flops += full * stats.prefill_flops_ratio

    def record(self, whole: Cost) -> dict[str, Any]:
        """Return the fields of `Stats`, with all ratios taken against the unpatched model on the same questions.

        whole: the cost of the latter. A method that acts on pixels does not know what it saved.
        """
        record = asdict(self)
        flops = record.pop("flops")
        record["visual_tokens_in"] = whole.visual_tokens_in
        record["kv_bytes_full"] = whole.kv_bytes
        record["visual_tokens_average"] = sum(self.visual_tokens_per_layer) / max(1, len(self.visual_tokens_per_layer))
        record["keep_ratio"] = self.visual_tokens_out / max(1, whole.visual_tokens_in)
        record["prefill_flops_ratio"] = flops / whole.flops
        return record


class _Prefill:
    """Reads from the cache itself how many bytes the last prefill left in it."""

    def __init__(self, subject: Subject) -> None:
        self.decoder, self.kv_bytes = subject.adapter.decoder, 0

    def __enter__(self) -> _Prefill:
        self._handle = self.decoder.register_forward_hook(self._look, with_kwargs=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.remove()

    def _look(self, module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        embeds, cache = kwargs.get("inputs_embeds"), kwargs.get("past_key_values")
        if embeds is not None and embeds.shape[1] > 1 and cache is not None:
            tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
            self.kv_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def patched(subject: Subject, name: str, keep: float | int, **options: Any) -> AbstractContextManager[Any]:
    """Return a context in which the subject's model is patched; methods that act on pixels get its processor."""
    if name == UNPATCHED:
        return nullcontext()
    site = method_class(name).site
    if site is tokenprune.Site.ATTENTION:
        raise UnsupportedSetupError(
            f"{name} acts on videos, and here the model sees pictures only: it would leave them as they are"
        )
    if site is tokenprune.Site.PRE_ENCODER:
        options["processor"] = subject.processor
    return tokenprune.patched(subject.model, name, keep=keep, **options)


def seeds_of(name: str, seeds: Sequence[int]) -> list[dict[str, int]]:
    """Return the options of each pass: one for each seed, or one pass without options."""
    if name != UNPATCHED and "seed" in tokenprune.method_info(name).options:
        return [{"seed": seed} for seed in seeds]
    return [{}]


class Bench:
    """One run; `records()` does the work, record by record."""

    def __init__(self, subject: Subject, plan: Plan, step: Step | None = None) -> None:
        self.subject, self.plan = subject, plan
        self.examples: list[Example] = load_heldout(limit=plan.pictures or None)
        size = plan.batch_size
        self.batches = [self.examples[start : start + size] for start in range(0, len(self.examples), size)]
        self._step, self._done = step or (lambda label, done, total: None), 0
        batches = sum(len(seeds_of(name, plan.seeds)) * len(self._batches(name)) for name in plan.methods)
        self.total = len(self.batches) + batches * len(plan.keeps)
        self._reused: list[dict[str, Any]] = []

    def records(self) -> Iterator[dict[str, Any]]:
        """Run everything; the order is header, unpatched, then the methods with the baselines first."""
        yield self.header()
        answers, whole = self._pass(UNPATCHED, 1.0, {})
        yield self._result(UNPATCHED, 1.0, [{}], [answers], whole, whole)
        for name in self.plan.methods:
            for keep in self.plan.keeps:
                try:
                    yield self._measure(name, keep, whole)
                except TokenPruneError as error:
                    reason = str(error).splitlines()[0]
                    yield {"record": "skipped", "method": name, "keep": keep, "reason": reason}

    def header(self) -> dict[str, Any]:
        index = {kind: f"{number}" for number, kind in enumerate(KINDS)}
        return {
            "record": "header",
            "schema": SCHEMA,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "kinds": list(KINDS),
            # One character a question: the index of its kind. `right` of every result has the same order.
            "kind_of_question": "".join(index[example.kind] for example in self.examples),
            "plan": asdict(self.plan),
            "suffix": self.subject.suffix,
            "max_new_tokens": self.subject.max_new_tokens,
            "environment": self.subject.environment(),
        }

    def _measure(self, name: str, keep: float | int, whole: Cost) -> dict[str, Any]:
        if method_class(name).chooses_pictures:
            raise OptionError(f"{name} chooses between the pictures of a prompt; these questions have one each")
        options = seeds_of(name, self.plan.seeds)
        passes = [self._pass(name, keep, one) for one in options]
        record = self._result(name, keep, options, [answers for answers, _ in passes], passes[0][1], whole)
        if self.plan.repeats:
            example = self.examples[0]
            record["timing"] = compare(
                self.subject,
                lambda: patched(self.subject, name, keep, **options[0]),
                [example.image],
                [example.question],
                self.plan.repeats,
            )
        return record

    def _result(
        self, name: str, keep: float | int, options: list[dict[str, int]], answers: list[str], cost: Cost, whole: Cost
    ) -> dict[str, Any]:
        kinds = [example.kind for example in self.examples]
        correct = dict.fromkeys(KINDS, 0)
        for one in answers:
            for kind, answer in zip(kinds, one, strict=True):
                correct[kind] += int(answer)
        return {
            "record": "result",
            "method": name,
            "keep": keep,
            "site": None if name == UNPATCHED else tokenprune.method_info(name).site.name,
            "seeds": [one["seed"] for one in options if one] or None,
            "n": {kind: kinds.count(kind) * len(answers) for kind in KINDS},
            "correct": correct,
            "right": answers,
            "questions": len(self.examples),
            "stats": cost.record(whole),
            "environment": self.subject.environment(),
        }

    def _pass(self, name: str, keep: float | int, options: dict[str, int]) -> tuple[str, Cost]:
        """Answer every question once; returns "1" (right) and "0" (wrong), one a question."""
        right, cost = "", Cost()
        label = name if name == UNPATCHED else f"{name} {keep:g}"
        with patched(self.subject, name, keep, **options), _Prefill(self.subject) as prefill:
            for number, batch in enumerate(self._batches(name)):
                inputs = self._inputs(name, number, batch)
                answers = self.subject.generate(inputs)
                cost.add(self.subject, inputs, None if name != UNPATCHED else prefill.kv_bytes)
                right += "".join(str(int(e.is_right(a.rstrip(".")))) for e, a in zip(batch, answers, strict=True))
                self._done += 1
                self._step(label, self._done, self.total)
        return right, cost

    def _batches(self, name: str) -> list[list[Example]]:
        """A method that looks at a picture to size it goes picture by picture: in a batch, LLaVA's processor would make
        all of them one size."""
        alone = name != UNPATCHED and tokenprune.method(name).by_content
        return [[example] for example in self.examples] if alone else self.batches

    def _inputs(self, name: str, number: int, batch: list[Example]) -> dict[str, Any]:
        pixels = name != UNPATCHED and method_class(name).site is tokenprune.Site.PRE_ENCODER
        if not pixels and number < len(self._reused):
            return dict(self._reused[number])
        inputs = self.subject.inputs([e.image for e in batch], [e.question for e in batch])
        # All methods that do not touch pixels take the same inputs; half a gigabyte of them is kept.
        size = sum(value.numel() * value.element_size() for value in inputs.values())
        if not pixels and number == len(self._reused) and size * (number + 1) <= 2**29:
            self._reused.append(inputs)
        return dict(inputs)
