# SPDX-License-Identifier: Apache-2.0
"""Check how a model is called: refuse rows with several samples, and note calls that prune less than expected."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.call import Call
from tokenprune.integrations.hf.forward.decoder_inputs import DecoderInputs
from tokenprune.integrations.hf.forward.part import Part
from tokenprune.integrations.hf.forward.plan import Plan
from tokenprune.integrations.hf.sequence.packing import borders, unread
from tokenprune.integrations.shared.attachable import get_thread_states
from tokenprune.selection.method import Method
from tokenprune.selection.observable_registry import select_observables

logger = logging.getLogger("tokenprune")


class CallCheck(Part):
    """Stands where methods may remove tokens. methods: those that choose at the decoder.

    A note is written to the statistics of each call, and logged once.
    """

    def __init__(self, adapter: Adapter, methods: Sequence[Method]) -> None:
        super().__init__()
        self.adapter = adapter
        self.reading = [method.name for method in methods if method.query_aware]
        self.absolute = [
            method.name for method in methods if any(seen.absolute for seen in select_observables(method.needs))
        ]
        self.logged: set[str] = set()

    def before_decoder(self, call: Call, inputs: DecoderInputs) -> None:
        rows, length = inputs.embeds.shape[:2]
        if call.has_images:
            self._note_step(call, (rows, length))
            self._note_padding(call, inputs)
        elif length > 1 and not call.past and not call.outputs and call.arguments.get("input_ids") is None:
            self._note(
                call,
                "the prompt came as embeddings without pixels: if it holds images, nothing tells where, and nothing "
                "was pruned; pass pixel_values with input_ids, or with embeddings of placeholders",
            )

    def on_plan(self, call: Call, plan: Plan) -> Plan:
        if not (plan.cuts or call.maskless or call.merged is not None):
            return plan
        given, prompt, mrope = call.arguments, call.prompt, hasattr(self.adapter.base, "get_rope_index")
        if (reason := borders(given, prompt.has_sample_numbers, prompt.position_ids, mrope)) is not None:
            raise UnsupportedSetupError(
                f"A row holds several samples (by {reason}), and a cut would treat them as one. Give each sample its "
                "own row with padding (packing=False, padding_free=False, no DataCollatorWithFlattening)."
            )
        if (reason := unread(given, prompt.padding, prompt.position_ids)) is not None:
            self._note(
                call,
                f"position_ids begin anew inside a row, which counts as one sample all the same, in attention too: "
                f"{reason}; give each sample a row of its own",
            )
        return plan

    def _note_step(self, call: Call, shape: tuple[int, int]) -> None:
        """Note where `generate` goes on without a cache: each step reads the whole prompt, and the answer so far."""
        if not self.reading or call.arguments.get("use_cache") is not False:
            return
        rows, length = shape
        if get_thread_states().get(self) == (rows, length - 1):
            names = " and ".join(self.reading)
            self._note(
                call,
                f"without a cache {names} chose anew for this step, by the token written last: the answer may be "
                "another than with use_cache=True",
            )
        get_thread_states()[self] = shape

    def _note_padding(self, call: Call, inputs: DecoderInputs) -> None:
        """Note a left-padded prompt without position ids if a method reads values that depend on the positions."""
        if not self.absolute or inputs.positions is not None or call.past or call.prompt.is_real[:, 0].all():
            return
        if self.adapter.positions(inputs.mask, call.past) is None:
            names = " and ".join(dict.fromkeys(self.absolute))
            self._note(
                call,
                f"{names} reads values that depend on position ids, which count the left padding here: the choice may "
                "differ from that of unpadded rows. Pass position_ids, or call generate()",
            )

    def _note(self, call: Call, note: str) -> None:
        call.notes.append(note)
        if note not in self.logged:
            self.logged.add(note)
            logger.warning(note)
