# SPDX-License-Identifier: Apache-2.0
"""The words of a session: the pieces of a chat template, and frames as a processor takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tokenprune.errors import SessionError

_MARK, _OTHER = "qzmark", "qzother"


@dataclass(frozen=True)
class Template:
    """Pieces of a processor's chat template, found by comparing what it writes for chats that differ in one part.

    opening: what comes before the first part of the user's first turn, a system prompt among it. text: (before, after)
    what wraps a part of text. image, video: parts that are such; video is empty where a template writes none. closing:
    from the end of the user's turn to the answer. reopening: from the end of an answer to the user's next part.
    """

    opening: str
    text: tuple[str, str]
    image: str
    video: str
    closing: str
    reopening: str

    @staticmethod
    def of(processor: Any) -> Template:
        """Return the pieces of a processor's template; raises SessionError where it does not write the parts of a turn
        one after the other."""
        text, image = {"type": "text", "text": _MARK}, {"type": "image"}
        try:
            one, two, seen, more = (_write(processor, [("user", parts)]) for parts in
                                    ([text], [text] * 2, [image], [image] * 2))  # fmt: skip
            clip, clips = (_write(processor, [("user", [{"type": "video"}] * number)]) for number in (1, 2))
            prompt = _write(processor, [("user", [text])], add_generation_prompt=True)
            answer = {"type": "text", "text": _OTHER}
            turns = _write(processor, [("user", [text]), ("assistant", [answer]), ("user", [text])])
        except Exception as error:
            raise SessionError(
                f"the chat template of this processor cannot be used ({' '.join(str(error).split())}): hand over ids, "
                "say(ids), see(input_ids=..., pixel_values=...) and ask(ids)"
            ) from error
        places = [place for place in _repeats(one, two) if place in _repeats(seen, more)]
        between = turns.partition(_OTHER)[2].partition(_MARK)
        if not places or one[: places[0]] != seen[: places[0]] or not between[1]:
            raise SessionError("the chat template does not write images and text one after the other: hand over ids")
        start, length = places[0], len(two) - len(one)
        before, _, after = one[start : start + length].partition(_MARK)
        return Template(
            opening=one[:start],
            text=(before, after),
            image=seen[start : start + len(more) - len(seen)],
            video=clip[start : start + len(clips) - len(clip)] if start in _repeats(clip, clips) else "",
            closing=prompt[start + length :],
            reopening=between[0].removesuffix(before),
        )


def _write(processor: Any, turns: Sequence[tuple[str, list]], **options: Any) -> str:
    chat = [{"role": role, "content": parts} for role, parts in turns]
    return processor.apply_chat_template(chat, tokenize=False, **options)


def _repeats(once: str, twice: str) -> list[int]:
    """Return where in `once` a part may begin that `twice` has two of, one after the other."""
    length = len(twice) - len(once)
    return [
        start
        for start in range(len(once) - length + 1)
        if length > 0 and once[: start + length] + once[start:] == twice
    ]


class Words:
    """A processor, and what a session asks of it. Ids are long `[1, n]`."""

    def __init__(self, processor: Any) -> None:
        self.processor, self.template = processor, Template.of(processor)

    def opening(self) -> Tensor:
        """Return ids of what comes before the first words of the user, special tokens among them."""
        tokenizer, text = self.processor.tokenizer, self.template.opening
        begins = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
        ids = tokenizer(text, add_special_tokens=not begins)["input_ids"]
        if not begins and ids and ids[-1] == tokenizer.eos_token_id:
            ids = ids[:-1]  # some tokenizers end a text, too
        return _row(ids)

    def said(self, text: str, closing: bool = False) -> Tensor:
        """Return ids of a part of text. closing: the turn ends, and the answer follows."""
        before, after = self.template.text
        return self._ids(before + text + after + (self.template.closing if closing else ""))

    def closing(self) -> Tensor:
        """Return ids of what comes between the user's last words and the answer."""
        return self._ids(self.template.closing)

    def reopened(self, answer: Tensor) -> Tensor:
        """Return ids of an answer (long `[m]`), and of what comes between it and the user's next words."""
        special = {*self.processor.tokenizer.all_special_ids}
        kept = [token for token in answer.tolist() if token not in special]
        return torch.cat([_row(kept), self._ids(self.template.reopening)], 1)

    def decode(self, answer: Tensor) -> str:
        """Return an answer (long `[m]`) in words."""
        return self.processor.tokenizer.decode(answer, skip_special_tokens=True).strip()

    def frames(self, frames: Sequence[Image.Image]) -> dict[str, Any]:
        """Return the model's arguments for frames that are images; raises SessionError for what the processor
        refuses."""
        return self._made(frames, self.template.image * len(frames), images=list(frames))

    def clip(self, frames: Sequence[Image.Image], first: int, fps: float | None) -> dict[str, Any]:
        """Return the model's arguments for frames that are a video. first: number of the first one in the stream. fps:
        frames a second, None for what the processor takes for granted."""
        video = np.stack([np.asarray(frame) for frame in frames])
        about = {"total_num_frames": len(frames), "frames_indices": list(range(first, first + len(frames)))}
        known = {} if fps is None else {"video_metadata": [about | {"fps": fps}]}
        return self._made(frames, self.template.video, videos=[video], do_sample_frames=False, **known)

    def _made(self, frames: Sequence[Image.Image], text: str, **given: Any) -> dict[str, Any]:
        try:
            made = self.processor(text=[text], add_special_tokens=False, return_tensors="pt", **given)
        except (ValueError, TypeError) as error:
            sizes = ", ".join(sorted({"x".join(map(str, frame.size)) for frame in frames}))
            reason = " ".join(str(error).split())
            raise SessionError(f"the processor refuses frames of {sizes} pixels: {reason}") from error
        return dict(made)

    def _ids(self, text: str) -> Tensor:
        return _row(self.processor.tokenizer(text, add_special_tokens=False)["input_ids"])


def _row(ids: Sequence[int]) -> Tensor:
    return torch.tensor([list(ids)], dtype=torch.long, device="cpu")


def as_frames(frames: Any) -> list[Image.Image]:
    """Return frames as images: of an image, a list of them, or an array or tensor, `[T, H, W, 3]`, `[T, 3, H, W]` or
    one frame of it, uint8 or floats in [0, 1]. Raises SessionError for anything else."""
    if isinstance(frames, Image.Image):
        frames = [frames]
    if isinstance(frames, (list, tuple)):
        found = [image for one in frames for image in ([one] if isinstance(one, Image.Image) else as_frames(one))]
    elif isinstance(frames, (np.ndarray, Tensor)):
        array = frames.detach().cpu().numpy() if isinstance(frames, Tensor) else frames
        found = [Image.fromarray(one) for one in _pixels(array)]
    else:
        raise SessionError(f"cannot see a {type(frames).__name__}: hand over an image, a list of them, or an array")
    if not found:
        raise SessionError("nothing to see: no frames")
    if empty := next((image for image in found if 0 in image.size), None):
        raise SessionError(f"nothing to see in a frame of {empty.size[0]}x{empty.size[1]} pixels")
    return [image.convert("RGB") for image in found]


def _pixels(array: np.ndarray) -> np.ndarray:
    """Return uint8 `[T, H, W, 3]`."""
    shape = array.shape
    array = array[None] if array.ndim == 3 else array
    if array.ndim != 4 or 3 not in (array.shape[1], array.shape[3]):
        raise SessionError(f"an array of shape {shape} is no video: [T, H, W, 3] or [T, 3, H, W] is")
    if array.shape[3] != 3:
        array = array.transpose(0, 2, 3, 1)
    if array.dtype == np.uint8:
        return array
    if not np.issubdtype(array.dtype, np.floating):
        raise SessionError(f"pixels are uint8, or floats in [0, 1], not {array.dtype}")
    if not (np.isfinite(array).all() and (array >= 0).all() and (array <= 1).all()):
        raise SessionError("pixels that are floats must be in [0, 1], and some are not, or are NaN")
    return (array * 255).round().astype(np.uint8)
