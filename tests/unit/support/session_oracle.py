# SPDX-License-Identifier: Apache-2.0
"""The oracle of sessions: one prefill of the whole stream, with a mask of the keys visible to each query."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

import tokenprune
from hooks import removed_after
from tokenprune.integrations.hf.sessions.memory import INDEX
from tokenprune.models.families.tested import SESSIONS
from zoo import FAMILIES, IMAGE, Family, InputImage, join

NAMES = [name for name in FAMILIES if name in SESSIONS]


@dataclass
class Forward:
    """A forward recorded in the stream: ids, inputs, positions, the indices held by each layer, and the indices of its
    own tokens that entered."""

    ids: torch.Tensor
    inputs: dict[str, Any]
    positions: torch.Tensor
    held: list[torch.Tensor]
    entered: torch.Tensor | None = None


@dataclass
class Recorded:
    """A session of ids on a tiny model, and all its forwards."""

    family: Family
    model: PreTrainedModel
    session: tokenprune.sessions.Session
    forwards: list[Forward] = field(default_factory=list)

    def __post_init__(self) -> None:
        stream = self.session._stream
        original = stream._record

        def record(ids, positions, frame_table, next_position):
            held = [table[INDEX].long() for table in stream.memory.tables]
            before = stream.progress.tokens
            original(ids, positions, frame_table, next_position)
            index = stream.memory.tables[0][INDEX, 0].long()
            inputs = stream_inputs.pop() if stream_inputs else {}
            self.forwards.append(Forward(ids, inputs, positions, held, index[index >= before] - before))

        stream_inputs: list[dict] = []
        see = stream.see

        def record_see(ids, inputs):
            stream_inputs.append({k: v for k, v in inputs.items() if k != "input_ids"})
            return see(ids, inputs)

        stream._record, stream.see = record, record_see

    def see(self, images: list[InputImage]) -> None:
        ids = [token for image in images for token in image.ids]
        self.session.see(input_ids=[ids], **collated(self.family, images))

    def logits(self, ids: list[int] = (50, 51, 52)) -> torch.Tensor:
        """Append text and return the logits of its last token, shape (vocab,)."""
        with self.session._enter_call():
            return self.session._stream.say(torch.tensor([list(ids)]))[0]

    def one_prefill(self, masked: bool = True) -> torch.Tensor:
        """Return the last token's logits from one forward. masked: hide dropped tokens, by layer and head."""
        ids = torch.cat([forward.ids for forward in self.forwards], 1)
        positions = torch.cat([forward.positions for forward in self.forwards], -1)
        inputs = join_inputs([forward.inputs for forward in self.forwards if forward.inputs])
        extra = {"token_type_ids": (ids == IMAGE).long()} if self.model.config.model_type == "gemma3" else {}
        layers = self.session._stream.adapter.decoder.layers
        handles = []
        if masked:
            for layer, mask in zip(layers, self.masks(ids), strict=True):
                hook = lambda module, args, kwargs, mask=mask: (args, kwargs | {"attention_mask": mask})  # noqa: E731
                handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        with removed_after(handles), torch.no_grad():
            positions = positions if len(positions) > 1 else positions[0]
            return self.model(input_ids=ids, position_ids=positions, use_cache=False, **inputs, **extra).logits[0, -1]

    def masks(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """Return the mask of visible keys of each layer, bool `[1, Hq, L, L]`."""
        config = self.session._stream.adapter.text_config
        length, heads = ids.shape[1], config.num_attention_heads
        both_ways = torch.zeros(length, length, dtype=torch.bool)
        if self.model.config.model_type == "gemma3":  # an image uses bidirectional attention
            image = ids[0] == IMAGE
            image_index = torch.where(image, (image & ~image.roll(1)).long().cumsum(0), -1)
            both_ways = (image_index[:, None] == image_index) & image
        index, masks, full_layer = torch.arange(length), [], 0
        for layer in self.session._stream.memory.cache.layers:
            if layer.is_sliding:
                in_window = index[:, None] - index < layer.sliding_window
                mask = (((index[:, None] >= index) | both_ways) & in_window).expand(heads, -1, -1)
            else:
                mask, start = torch.zeros(heads, length, length, dtype=torch.bool), 0
                for forward in self.forwards:
                    held, count = forward.held[full_layer], forward.ids.shape[1]
                    group = heads // len(held)
                    for head in range(heads):
                        mask[head, start : start + count, held[head // group]] = True
                    # A dropped token attends only to itself, and no other query attends to it.
                    visible = torch.eye(count, dtype=torch.bool)
                    visible[:, forward.entered] |= torch.ones(count, count).tril().bool()[:, forward.entered]
                    mask[:, start : start + count, start : start + count] = visible
                    start += count
                mask = mask | both_ways
                full_layer += 1
            masks.append(mask[None])
        return masks


def collated(family: Family, images: list[InputImage]) -> dict[str, Any]:
    """Return the encoder's arguments for a block. OneVision needs the number of images to choose tiles."""
    inputs = family.collate([[InputImage(i.ids, dict(i.pixels)) for i in images]])
    if "batch_num_images" in inputs:
        inputs["batch_num_images"] = torch.tensor([len(images)])
    return inputs


def join_inputs(inputs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the encoder's arguments of all blocks as arguments of one forward."""
    return join([[InputImage([], block_inputs)] for block_inputs in inputs])


def recorded(family: Family, model: PreTrainedModel, **options: Any) -> Recorded:
    options = {"memory": 10**6, "horizon": 10**6} | options
    return Recorded(family, model, tokenprune.sessions.session(model, **options))


def images_of(family: Family, count: int, seed: int = 3, size: int = 0) -> list[InputImage]:
    """Return images of one size. OneVision images have the layout of several images in a prompt."""
    g = torch.Generator().manual_seed(seed)
    return [family.image(family.sizes[size], g, 2) for _ in range(count)]


def played(record: Recorded, frames: int = 12, block: int = 2, asked: bool = False, size: int = 0) -> Recorded:
    """Append text, frames in blocks and, if `asked`, two equal questions after each block. Return `record`."""
    images = images_of(record.family, frames, size=size)
    record.session.say([1, 20, 21, 22])
    for start in range(0, frames, block):
        record.see(images[start : start + block])
        if asked:
            answers = [record.session.ask([30, 31, 32], max_new_tokens=3, return_dict=True) for _ in range(2)]
            assert torch.equal(answers[0].logits, answers[1].logits)
        if start == 4:
            record.session.say([40, 41, 42, 43, 44])
    return record


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return (actual - expected).abs().max().item() <= 1e-5 * max(1.0, expected.abs().max().item())
