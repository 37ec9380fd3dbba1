# SPDX-License-Identifier: Apache-2.0
"""The guard of a patched model.

Images are measured before the vision tower starts, and the values move to the host without blocking. The encoder's
output carries them, because `generate` encodes images before the first forward. Prompts are read from the ids that the
engine copies to the host together with the placeholders. In "warn" mode nothing waits for the device: if the values
have not arrived, the warning is logged in a later step. "auto" waits for them once per prefill.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenprune.budgets import Budget
from tokenprune.errors import OptionError, UnsupportedSetupError
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.part import Encode, Encoding, Part
from tokenprune.integrations.hf.guard.floors import Floors, load_floors
from tokenprune.integrations.hf.guard.messages import describe_guard, format_warning
from tokenprune.integrations.hf.guard.pixels import match_segments, measure_text
from tokenprune.integrations.hf.guard.prompts import KindReader
from tokenprune.integrations.hf.guard.settings import KINDS, Guard
from tokenprune.integrations.hf.guard.verdict import Verdict, Watch, Watched, compute_share
from tokenprune.integrations.hf.sequence.record import open_record
from tokenprune.integrations.shared.attachable import get_thread_states
from tokenprune.selection.method import Method, Site
from tokenprune.selection.sites.pixels import ImageChooser
from tokenprune.statistics import Stats

if TYPE_CHECKING:
    from tokenprune.integrations.hf.forward.call import Call
    from tokenprune.integrations.hf.forward.layer_inputs import DecoderInputs
    from tokenprune.integrations.hf.forward.plan import Plan

logger = logging.getLogger("tokenprune")

# Sites whose cuts can keep more tokens after the prompt is known.
_RAISABLE = (Site.PRE_LLM, Site.IN_LLM)
# Number of text tokens at the end of a prompt that are read.
_MAX_TEXT_TOKENS = 2048


def build_guard(
    adapter: Adapter, guard: Guard, methods: Sequence[Method], budgets: Sequence[Budget], processor: Any
) -> list[GuardPart]:
    """Return the guard of a patch, or an empty list if no kind of question is at risk.

    Args:
        adapter: Adapter of the model.
        guard: Settings with mode "warn" or "auto".
        methods: Methods of the patch.
        budgets: Budget of each method.
        processor: A processor with a tokenizer, or a tokenizer. None: prompts are not read.

    Raises:
        UnsupportedSetupError: If mode "auto" is used with a method that cannot keep more tokens for a single prompt.
    """
    if guard.mode == "auto":
        for method, budget in zip(methods, budgets, strict=True):
            site = next((site for site in _get_sites(method, budget, adapter) if site not in _RAISABLE), None)
            if site is Site.ATTENTION or (site is not None and not budget.is_identity()):
                raise UnsupportedSetupError(
                    f'guard="auto" can only raise budgets at PRE_LLM and IN_LLM, and {method.name} acts at {site}. '
                    'Use guard="warn", or a method at PRE_LLM or IN_LLM.'
                )
    table = load_floors()
    watched = []
    for method, budget in zip(methods, budgets, strict=True):
        # Methods that choose between images were never measured. Methods that drop no tokens are safe.
        if budget.is_identity() or isinstance(method, ImageChooser) or not method.removes:
            continue
        floors = {kind: guard.floors.get(kind, table.get_floor(method.name, kind)) for kind in KINDS}
        share = compute_share(budget)
        # The floors were measured for single methods: in a combination no share is known to be enough.
        if len(methods) > 1 or share is None or share < max(floors.values()):
            watched.append(Watched.from_method(method, budget, floors, len(adapter.decoder.layers)))
    return [GuardPart(adapter, guard, watched, table, get_tokenizer(processor))] if watched else []


def _get_sites(method: Method, budget: Budget, adapter: Adapter) -> list[Site]:
    """Return the sites of a configured method, which can depend on its options."""
    return [stage.site for stage, _ in method.stages(budget, len(adapter.decoder.layers))]


def get_tokenizer(processor: Any) -> Any:
    """Return the tokenizer of a processor, the tokenizer itself, or None."""
    tokenizer = getattr(processor, "tokenizer", processor)
    return tokenizer if callable(getattr(tokenizer, "decode", None)) else None


def check_processor(processor: Any, methods: Sequence[Method]) -> None:
    """Raise OptionError for a processor without a tokenizer, if no method acts on pixels."""
    if get_tokenizer(processor) is None:
        names = ", ".join(method.name for method in methods)
        raise OptionError(
            f"The {type(processor).__name__} has no tokenizer for the guard to read prompts with, and {names} does not "
            "act on pixels. Pass the full processor, or omit processor=."
        )


class GuardPart(Part):
    """Checks the images and prompts of a patched model.

    Args:
        adapter: Adapter of the model.
        settings: Settings of the guard.
        watched: Methods that may keep too few tokens.
        table: Measured losses.
        tokenizer: Tokenizer to read prompts with, or None.
    """

    def __init__(
        self, adapter: Adapter, settings: Guard, watched: Sequence[Watched], table: Floors, tokenizer: Any
    ) -> None:
        super().__init__()
        self.adapter, self.settings, self.table = adapter, settings, table
        self.tokenizer, self.reader = tokenizer, KindReader(settings.patterns)
        self.reads_text = tokenizer is not None
        floors = [
            (entry.method.name, entry.get_floors_at_risk() if len(watched) == 1 else entry.floors) for entry in watched
        ]
        self.line = describe_guard(settings, floors, self.reads_text)
        before_decoder = {Site.PRE_ENCODER, Site.IN_ENCODER}
        elsewhere = [
            entry for entry in watched if before_decoder & set(_get_sites(entry.method, entry.budget, adapter))
        ]
        num_layers = len(adapter.decoder.layers)
        cuts = {
            method.cut_layer: entry
            for entry in watched
            if entry not in elsewhere
            for method, _ in entry.method.stages(entry.budget, num_layers)
        }
        self.watch = Watch(cuts, elsewhere, settings.text_limit)
        self._logged: set[tuple[str, str]] = set()

    def _attach(self) -> None:
        logger.info("%s", self.line)

    def around_encode(self, encode: Encode, encoding: Encoding) -> Any:
        looks = measure_text(self.adapter, encoding.modality, encoding.on_host)
        output = encode(encoding)
        if looks is not None and hasattr(output, "pooler_output"):
            open_record(output).looks = looks
        return output

    def before_decoder(self, call: Call, inputs: DecoderInputs) -> None:
        self._log_pending()

    def on_plan(self, call: Call, plan: Plan) -> Plan:
        """Raise the plan in "auto" mode, log warnings in "warn" mode, and fill the statistics."""
        rows, counts = list(call.state.segments.row), list(call.state.segments.counts)
        looks = match_segments(call, self.adapter)
        verdict = Verdict(self.watch, call.trace.shape, rows, counts, self._read(call), looks)
        if self.settings.mode == "auto":
            shares = looks.read()
            verdict.required_kinds = [verdict.get_kinds(row, share) for row, share in zip(rows, shares, strict=True)]
            plan = plan.with_floor(verdict.raise_counts)
        verdict.conclude(plan)
        call.trace.stats.defer(partial(self._fill, verdict))
        if self.settings.mode == "warn":
            if not looks.is_ready():
                get_thread_states()[self] = verdict  # until a later step of this thread logs it
            self._log(verdict)
        return plan

    def _read(self, call: Call) -> dict[int, tuple[str, ...]] | None:
        """Return the kinds of questions of each row, or None if prompts cannot be read."""
        if self.tokenizer is None or call.prompt.input_ids is None:
            return None
        text = call.prompt.is_real & ~call.prompt.is_visual
        kinds = {}
        for row in dict.fromkeys(call.state.segments.row):
            ids = call.prompt.input_ids[row][text[row]][-_MAX_TEXT_TOKENS:].tolist()
            kinds[row] = self.reader.kinds(self.tokenizer.decode(ids, skip_special_tokens=True))
        return kinds

    def _log_pending(self) -> None:
        verdict = get_thread_states().get(self)
        if verdict is not None and verdict.looks.is_ready():
            del get_thread_states()[self]
            self._log(verdict)

    def _log(self, verdict: Verdict) -> None:
        """Log each known reason once."""
        shares = verdict.looks.read() if verdict.looks.is_ready() else [None] * len(verdict.rows)
        for index, (row, text_share) in enumerate(zip(verdict.rows, shares, strict=True)):
            for source, kind in verdict.get_reasons(row, text_share):
                if (index, kind) in verdict.low and (source, kind) not in self._logged:
                    self._logged.add((source, kind))
                    watched, share = verdict.low[index, kind]
                    raisable = watched not in self.watch.elsewhere and watched.method.site in _RAISABLE
                    name, floor = watched.method.name, watched.floors[kind]
                    logger.warning("%s", format_warning(source, kind, name, share, floor, raisable, self.table))

    def _fill(self, verdict: Verdict, stats: Stats) -> None:
        stats.guard = verdict.findings()
        self._log_pending()
