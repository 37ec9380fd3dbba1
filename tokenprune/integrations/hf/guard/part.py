# SPDX-License-Identifier: Apache-2.0
"""The guard of a patched model: what it sees of prompts and images, and what it does about it.

Images are looked at before the vision tower is launched, and the verdict is sent to the host without waiting; it
travels with the encoder's output, as `generate` encodes images before any forward. Prompts are read from the ids that
the engine brings to the host together with the placeholders. In "warn" mode nothing waits for the device: where a
verdict has not arrived, the warning comes with a later step. "auto" waits for it once in a prefill.
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
from tokenprune.integrations.hf.guard.floors import Floors, shipped
from tokenprune.integrations.hf.guard.messages import statement, warning
from tokenprune.integrations.hf.guard.pixels import look, looks_of_segments
from tokenprune.integrations.hf.guard.prompts import KindReader
from tokenprune.integrations.hf.guard.settings import KINDS, Guard
from tokenprune.integrations.hf.guard.verdict import Verdict, Watch, Watched, share_of
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

# Where more tokens can be kept when a prompt is seen: by budget, in one cut.
_RAISABLE = (Site.PRE_LLM, Site.IN_LLM)
# Of a prompt's text, the tokens at its end that are read.
_READ = 2048


def guard_for(
    adapter: Adapter, guard: Guard, methods: Sequence[Method], budgets: Sequence[Budget], processor: Any
) -> list[GuardPart]:
    """Return the guard of a patch, if it is not "off"; nothing where no kind of question is at risk.

    processor: with a tokenizer, or the tokenizer itself; None: prompts are not read.
    Raises UnsupportedSetupError for mode "auto" with a method that cannot keep more tokens of one prompt.
    """
    if guard.mode == "auto":
        for method, budget in zip(methods, budgets, strict=True):
            site = next((one for one in _sites(method, budget, adapter) if one not in _RAISABLE), None)
            if site is Site.ATTENTION or (site is not None and not budget.is_identity()):
                raise UnsupportedSetupError(
                    f'guard="auto" keeps more tokens of a prompt by a budget at the decoder, and {method.name} acts at '
                    f'{site}: use guard="warn", or a method at PRE_LLM or IN_LLM'
                )
    table = shipped()
    watched = []
    for method, budget in zip(methods, budgets, strict=True):
        # A choice between images was never measured; and what removes no tokens puts none at risk.
        if budget.is_identity() or isinstance(method, ImageChooser) or not method.removes:
            continue
        floors = {kind: guard.floors.get(kind, table.of(method.name, kind)) for kind in KINDS}
        share = share_of(budget)
        # Several methods take tokens from each other: a share is known to be enough only for a method alone.
        if len(methods) > 1 or share is None or share < max(floors.values()):
            watched.append(Watched.of(method, budget, floors, len(adapter.decoder.layers)))
    return [GuardPart(adapter, guard, watched, table, tokenizer_of(processor))] if watched else []


def _sites(method: Method, budget: Budget, adapter: Adapter) -> list[Site]:
    """Return where a method acts: an option may say so, which its class does not know."""
    return [stage.site for stage, _ in method.stages(budget, len(adapter.decoder.layers))]


def tokenizer_of(processor: Any) -> Any:
    """Return what decodes ids, of a processor or itself; None if there is nothing of the kind."""
    tokenizer = getattr(processor, "tokenizer", processor)
    return tokenizer if callable(getattr(tokenizer, "decode", None)) else None


def check_processor(processor: Any, methods: Sequence[Method]) -> None:
    """Raise OptionError for a processor that the guard cannot read prompts with."""
    if tokenizer_of(processor) is None:
        names = ", ".join(method.name for method in methods)
        raise OptionError(
            f"{names} does not act on pixels, and a {type(processor).__name__} has no tokenizer for the guard to read "
            "prompts with: leave out processor=, or pass the whole processor"
        )


class GuardPart(Part):
    """Looks at images and prompts of a patched model. watched: the methods that can leave too few tokens."""

    def __init__(
        self, adapter: Adapter, settings: Guard, watched: Sequence[Watched], table: Floors, tokenizer: Any
    ) -> None:
        super().__init__()
        self.adapter, self.settings, self.table = adapter, settings, table
        self.tokenizer, self.reader = tokenizer, KindReader(settings.patterns)
        self.reads_text = tokenizer is not None
        floors = [(one.method.name, one.at_risk() if len(watched) == 1 else one.floors) for one in watched]
        self.line = statement(settings, floors, self.reads_text)
        # What makes no cut at the decoder; and of the others, which cuts are theirs.
        ahead = {Site.PRE_ENCODER, Site.IN_ENCODER}
        elsewhere = [one for one in watched if ahead & set(_sites(one.method, one.budget, adapter))]
        layers = len(adapter.decoder.layers)
        cuts = {
            method.cut_layer: one
            for one in watched
            if one not in elsewhere
            for method, _ in one.method.stages(one.budget, layers)
        }
        self.watch = Watch(cuts, elsewhere, settings.text_limit)
        self._said: set[tuple[str, str]] = set()

    def _attach(self) -> None:
        logger.info("%s", self.line)

    # -- images

    def around_encode(self, encode: Encode, encoding: Encoding) -> Any:
        looks = look(self.adapter, encoding.modality, encoding.on_host)
        output = encode(encoding)
        if looks is not None and hasattr(output, "pooler_output"):
            open_record(output).looks = looks
        return output

    # -- in a call

    def before_decoder(self, call: Call, inputs: DecoderInputs) -> None:
        self._say_late()

    def on_plan(self, call: Call, plan: Plan) -> Plan:
        """All is known of a call but what may still be on its way: keep more, or warn, and have the statistics tell."""
        rows, counts = list(call.state.segments.row), list(call.state.segments.counts)
        looks = looks_of_segments(call, self.adapter)
        verdict = Verdict(self.watch, call.trace.shape, rows, counts, self._read(call), looks)
        if self.settings.mode == "auto":
            verdict.seen = [verdict.kinds(row, value) for row, value in zip(rows, looks.read(), strict=True)]
            plan = plan.with_floor(verdict.at_least)
        verdict.conclude(plan)
        call.trace.stats.defer(partial(self._fill, verdict))
        if self.settings.mode == "warn":
            if not looks.is_ready():
                get_thread_states()[self] = verdict  # of this thread, until it is reported
            self._say(verdict)
        return plan

    def _read(self, call: Call) -> dict[int, tuple[str, ...]] | None:
        """Return the kinds of question of each row; None if prompts cannot be read."""
        if self.tokenizer is None or call.prompt.input_ids is None:
            return None
        text = call.prompt.is_real & ~call.prompt.is_visual
        kinds = {}
        for row in dict.fromkeys(call.state.segments.row):
            ids = call.prompt.input_ids[row][text[row]][-_READ:].tolist()
            kinds[row] = self.reader.kinds(self.tokenizer.decode(ids, skip_special_tokens=True))
        return kinds

    # -- what is said

    def _say_late(self) -> None:
        verdict = get_thread_states().get(self)
        if verdict is not None and verdict.looks.is_ready():
            del get_thread_states()[self]
            self._say(verdict)

    def _say(self, verdict: Verdict) -> None:
        """Log what was not said before, as far as it is known."""
        values = verdict.looks.read() if verdict.looks.is_ready() else [None] * len(verdict.rows)
        for place, (row, value) in enumerate(zip(verdict.rows, values, strict=True)):
            for source, kind in verdict.reasons(row, value):
                if (place, kind) in verdict.low and (source, kind) not in self._said:
                    self._said.add((source, kind))
                    watched, share = verdict.low[place, kind]
                    raisable = watched not in self.watch.elsewhere and watched.method.site in _RAISABLE
                    floor = watched.floors[kind]
                    logger.warning("%s", warning(source, kind, watched.method.name, share, floor, raisable, self.table))

    def _fill(self, verdict: Verdict, stats: Stats) -> None:
        stats.guard = verdict.findings()
        self._say_late()
