# SPDX-License-Identifier: Apache-2.0
"""Chat templates and processor inputs of a session."""

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
    """Pieces of a processor's chat template, found by comparing its output for similar chats.

    Attributes:
        opening: Text before the first part of the first user turn, with a system prompt.
        text: Text before and after a text part.
        image: Text of an image part.
        video: Text of a video part. Empty if the template does not support videos.
        closing: Text from the end of a user turn to the answer.
        reopening: Text from the end of an answer to the next part of the user.
    """

    opening: str
    text: tuple[str, str]
    image: str
    video: str
    closing: str
    reopening: str

    @staticmethod
    def from_processor(processor: Any) -> Template:
        """Find the pieces of a processor's template.

        Raises:
            SessionError: If the template fails, or does not write the parts of a turn one after another.
        """
        text, image = {"type": "text", "text": _MARK}, {"type": "image"}
        try:
            text_once, text_twice, image_once, image_twice = (
                _write(processor, [("user", parts)]) for parts in ([text], [text] * 2, [image], [image] * 2)
            )
            clip_once, clip_twice = (_write(processor, [("user", [{"type": "video"}] * count)]) for count in (1, 2))
            prompt = _write(processor, [("user", [text])], add_generation_prompt=True)
            answer = {"type": "text", "text": _OTHER}
            turns = _write(processor, [("user", [text]), ("assistant", [answer]), ("user", [text])])
        except Exception as error:
            raise SessionError(
                f"The chat template of the processor failed ({' '.join(str(error).split())}). Pass token ids: "
                "say(ids), see(input_ids=..., pixel_values=...) and ask(ids)."
            ) from error
        image_starts = _find_repeats(image_once, image_twice)
        starts = [start for start in _find_repeats(text_once, text_twice) if start in image_starts]
        between = turns.partition(_OTHER)[2].partition(_MARK)
        if not starts or text_once[: starts[0]] != image_once[: starts[0]] or not between[1]:
            raise SessionError("The chat template does not write images and text one after another. Pass token ids.")
        start, length = starts[0], len(text_twice) - len(text_once)
        before, _, after = text_once[start : start + length].partition(_MARK)
        has_video = start in _find_repeats(clip_once, clip_twice)
        return Template(
            opening=text_once[:start],
            text=(before, after),
            image=image_once[start : start + len(image_twice) - len(image_once)],
            video=clip_once[start : start + len(clip_twice) - len(clip_once)] if has_video else "",
            closing=prompt[start + length :],
            reopening=between[0].removesuffix(before),
        )


def _write(processor: Any, turns: Sequence[tuple[str, list]], **options: Any) -> str:
    chat = [{"role": role, "content": parts} for role, parts in turns]
    return processor.apply_chat_template(chat, tokenize=False, **options)


def _find_repeats(once: str, twice: str) -> list[int]:
    """Return the possible starts in `once` of a part that `twice` repeats."""
    length = len(twice) - len(once)
    return [
        start
        for start in range(len(once) - length + 1)
        if length > 0 and once[: start + length] + once[start:] == twice
    ]


class PromptWriter:
    """Writes the prompts and model inputs of a session. Token ids have shape (1, tokens), int64.

    Args:
        processor: Processor of the model.
    """

    def __init__(self, processor: Any) -> None:
        self.processor, self.template = processor, Template.from_processor(processor)

    def encode_opening(self) -> Tensor:
        """Return the token ids before the first part of the user, with special tokens."""
        tokenizer, text = self.processor.tokenizer, self.template.opening
        has_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
        ids = tokenizer(text, add_special_tokens=not has_bos)["input_ids"]
        if not has_bos and ids and ids[-1] == tokenizer.eos_token_id:
            ids = ids[:-1]  # some tokenizers also append the end token
        return _to_row(ids)

    def encode_text(self, text: str, closing: bool = False) -> Tensor:
        """Return the token ids of a text part. With `closing` the turn ends and the answer follows."""
        before, after = self.template.text
        return self._tokenize(before + text + after + (self.template.closing if closing else ""))

    def encode_closing(self) -> Tensor:
        """Return the token ids between the last part of the user and the answer."""
        return self._tokenize(self.template.closing)

    def encode_reopening(self, answer: Tensor) -> Tensor:
        """Return the token ids of an answer, shape (tokens,), and of the text up to the next part of the user."""
        special = {*self.processor.tokenizer.all_special_ids}
        kept = [token for token in answer.tolist() if token not in special]
        return torch.cat([_to_row(kept), self._tokenize(self.template.reopening)], 1)

    def decode(self, answer: Tensor) -> str:
        """Return the text of an answer, shape (tokens,)."""
        return self.processor.tokenizer.decode(answer, skip_special_tokens=True).strip()

    def prepare_images(self, frames: Sequence[Image.Image]) -> dict[str, Any]:
        """Return the model inputs of frames as images, or raise SessionError if the processor fails."""
        return self._process(frames, self.template.image * len(frames), images=list(frames))

    def prepare_clip(self, frames: Sequence[Image.Image], first: int, fps: float | None) -> dict[str, Any]:
        """Return the model inputs of frames as a video, or raise SessionError if the processor fails.

        Args:
            frames: The frames.
            first: Index of the first frame in the stream.
            fps: Frames per second, or None for the default of the processor.
        """
        video = np.stack([np.asarray(frame) for frame in frames])
        metadata = {"total_num_frames": len(frames), "frames_indices": list(range(first, first + len(frames)))}
        options = {} if fps is None else {"video_metadata": [metadata | {"fps": fps}]}
        return self._process(frames, self.template.video, videos=[video], do_sample_frames=False, **options)

    def _process(self, frames: Sequence[Image.Image], text: str, **options: Any) -> dict[str, Any]:
        try:
            inputs = self.processor(text=[text], add_special_tokens=False, return_tensors="pt", **options)
        except (ValueError, TypeError) as error:
            sizes = ", ".join(sorted({"x".join(map(str, frame.size)) for frame in frames}))
            reason = " ".join(str(error).split())
            raise SessionError(f"The processor does not accept frames of {sizes} pixels: {reason}") from error
        return dict(inputs)

    def _tokenize(self, text: str) -> Tensor:
        return _to_row(self.processor.tokenizer(text, add_special_tokens=False)["input_ids"])


def _to_row(ids: Sequence[int]) -> Tensor:
    return torch.tensor([list(ids)], dtype=torch.long, device="cpu")


def as_frames(frames: Any) -> list[Image.Image]:
    """Convert frames to RGB images.

    Args:
        frames: An image, a list of images, or an array or tensor of shape (frames, height, width, 3), (frames, 3,
            height, width), or of a single frame, with uint8 values or floats in [0, 1].

    Raises:
        SessionError: If the frames are empty or not valid.
    """
    if isinstance(frames, Image.Image):
        frames = [frames]
    if isinstance(frames, (list, tuple)):
        images = [
            image for frame in frames for image in ([frame] if isinstance(frame, Image.Image) else as_frames(frame))
        ]
    elif isinstance(frames, (np.ndarray, Tensor)):
        array = frames.detach().cpu().numpy() if isinstance(frames, Tensor) else frames
        images = [Image.fromarray(pixels) for pixels in _read_pixels(array)]
    else:
        raise SessionError(
            f"Frames of type {type(frames).__name__} are not supported. Pass an image, a list or an array."
        )
    if not images:
        raise SessionError("There are no frames. Pass at least one image.")
    if empty := next((image for image in images if 0 in image.size), None):
        raise SessionError(f"A frame of {empty.size[0]}x{empty.size[1]} pixels is empty.")
    return [image.convert("RGB") for image in images]


def _read_pixels(array: np.ndarray) -> np.ndarray:
    """Return uint8 pixels, shape (frames, height, width, 3)."""
    shape = array.shape
    array = array[None] if array.ndim == 3 else array
    if array.ndim != 4 or 3 not in (array.shape[1], array.shape[3]):
        raise SessionError(
            f"An array of shape {shape} is not a video. Pass (frames, height, width, 3) or (frames, 3, height, width)."
        )
    if array.shape[3] != 3:
        array = array.transpose(0, 2, 3, 1)
    if array.dtype == np.uint8:
        return array
    if not np.issubdtype(array.dtype, np.floating):
        raise SessionError(f"Pixels of dtype {array.dtype} are not supported. Pass uint8, or floats in [0, 1].")
    if not (np.isfinite(array).all() and (array >= 0).all() and (array <= 1).all()):
        raise SessionError("Some pixels are NaN or outside of [0, 1]. Pass uint8, or floats in [0, 1].")
    return (array * 255).round().astype(np.uint8)
