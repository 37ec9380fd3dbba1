# SPDX-License-Identifier: Apache-2.0
"""Notice images that were encoded for a prompt and then never reached the model."""

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
    """Raises UnsupportedSetupError where `generate` encodes images and then leaves them, or parts of them, out of the
    prompt's forward.

    With `prefill_chunk_size`, transformers 5.19 hands over no images at all, without a word, and 5.23 those features
    that a chunk holds placeholders for; tokens are chosen from whole images.
    """

    def __init__(self, adapter: Adapter) -> None:
        super().__init__()
        self.adapter = adapter

    def around_encode(self, encode: Encode, encoding: Encoding) -> Any:
        output = encode(encoding)
        if self.current() is None:  # ahead of any forward, as `generate` does
            get_thread_states().setdefault(self, {})[encoding.modality] = weakref.ref(output)
        return output

    def before_decoder(self, call: Call, inputs: DecoderInputs) -> None:
        waiting = get_thread_states().pop(self, None)
        if waiting is None:
            return
        ahead = {modality: output for modality, ref in waiting.items() if (output := ref()) is not None}
        handed = call.arguments.get("mm_encoder_outputs") or {}
        if call.outputs and not handed:
            return  # another prompt, with pixels
        masks = self.adapter.visual_mask(call.arguments) if ahead else {}
        if ahead and not call.outputs and not any(bool(mask.any()) for mask in masks.values()):
            get_thread_states()[self] = waiting  # text before the images
            return
        for modality, output in ahead.items():
            if modality in call.outputs:
                here, encoded = feature_total(call.outputs[modality]), feature_total(output)
                lost = here is not None and encoded is not None and here < encoded
            else:
                lost = modality in masks and bool(masks[modality].any())
            if lost:
                raise UnsupportedSetupError(
                    "A part of the prompt came without its images, because generate() got prefill_chunk_size. Leave "
                    "prefill_chunk_size out."
                )
