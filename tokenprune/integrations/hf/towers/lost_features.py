# SPDX-License-Identifier: Apache-2.0
"""Detect images that were encoded for a prompt but did not reach the forward."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.part import Encode, Encoding, Part
from tokenprune.integrations.hf.sequence.segments import feature_total
from tokenprune.integrations.shared.attachable import get_thread_states

if TYPE_CHECKING:
    from tokenprune.integrations.hf.forward.call import Call
    from tokenprune.integrations.hf.forward.decoder_inputs import DecoderInputs


class ChunkedPrefillCheck(Part):
    """Raises UnsupportedSetupError if `generate` encodes images but omits some of their features in the forward.

    With `prefill_chunk_size`, transformers 5.19 silently passes no images, and 5.23 passes only the features of the
    chunk's placeholders. Methods select tokens from complete images.
    """

    def __init__(self, adapter: Adapter) -> None:
        super().__init__()
        self.adapter = adapter

    def around_encode(self, encode: Encode, encoding: Encoding) -> Any:
        output = encode(encoding)
        if self.current() is None:  # before the first forward, as in `generate`
            get_thread_states().setdefault(self, {})[encoding.modality] = weakref.ref(output)
        return output

    def before_decoder(self, call: Call, inputs: DecoderInputs) -> None:
        waiting = get_thread_states().pop(self, None)
        if waiting is None:
            return
        pending = {modality: output for modality, ref in waiting.items() if (output := ref()) is not None}
        passed = call.arguments.get("mm_encoder_outputs") or {}
        if call.outputs and not passed:
            return  # a different prompt, called with pixels
        masks = self.adapter.visual_mask(call.arguments) if pending else {}
        if pending and not call.outputs and not any(bool(mask.any()) for mask in masks.values()):
            get_thread_states()[self] = waiting  # a chunk of text before the images
            return
        for modality, output in pending.items():
            if modality in call.outputs:
                received, encoded = feature_total(call.outputs[modality]), feature_total(output)
                lost = received is not None and encoded is not None and received < encoded
            else:
                lost = modality in masks and bool(masks[modality].any())
            if lost:
                raise UnsupportedSetupError(
                    "A chunk of the prompt has placeholders without image features, because prefill_chunk_size is set. "
                    "Call generate() without prefill_chunk_size."
                )
