# SPDX-License-Identifier: Apache-2.0
"""Models under test: the shipped models, or any that AutoModelForImageTextToText and AutoProcessor can load."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from tokenprune.errors import OptionError, TokenPruneError, require
from tokenprune.integrations.hf.families import Adapter, get_adapter
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.models.model_config import (
    SHIPPED,
    check_source,
    describe_known_images,
    get_max_answer_tokens,
    get_shipped_checkpoint,
    get_shipped_folder,
)
from tokenprune_bench.errors import DataError
from tokenprune_bench.profiling.media import RowError, check_sizes

# Other models answer in sentences without this request. The words are from LLaVA.
SHORT = "\nAnswer the question using a single word or phrase."


@dataclass
class Model:
    """A model with its processor, and the prompts and limits of its answers.

    Attributes:
        model: The transformers model.
        processor: Its processor.
        name: Name for tables and messages.
        suffix: Text added to every question.
        max_new_tokens: Maximum length of an answer.
        weights: Digest of the weights file of a shipped model, else None.
        heldout: Folder of the held-out set of a shipped model.
        metric: Default metric of the benchmark for this model.
    """

    model: Any
    processor: Any
    name: str
    suffix: str = ""
    max_new_tokens: int = 4
    weights: str | None = None
    heldout: Path | None = None
    metric: str = "exact"

    def describe_limits(self, files: Iterable[Path] = ()) -> str:
        """Return a note about a shipped model's answers on other images.

        Empty for other models, and if all files are in the model's held-out set.
        """
        files = [file.resolve() for file in files]
        if self.weights is None or (files and all(self.heldout in file.parents for file in files)):
            return ""
        return f"{self.name} {describe_known_images(self.name)}"

    @cached_property
    def adapter(self) -> Adapter:
        return get_adapter(self.model)

    @cached_property
    def shape(self) -> DecoderShape:
        return DecoderShape.from_config(self.adapter.text_config)

    def inputs(
        self,
        images: Sequence[Image.Image | Sequence[Any]],
        questions: Sequence[str],
        labels: Sequence[Sequence[str]] = (),
    ) -> dict[str, Any]:
        """Return the model's arguments for a left-padded batch with one question per row.

        Args:
            images: One image or list of images per row.
            questions: One question per row.
            labels: For each row the text before each image, or an empty sequence.

        Raises:
            DataError: If the processor rejects an image.
        """
        rows = [row if isinstance(row, (list, tuple)) else [row] for row in images]
        said = labels or [()] * len(rows)
        return self._process([_build_image_parts(row, texts) for row, texts in zip(rows, said, strict=True)], questions)

    def prompt(self, images: Sequence[Any], question: str, labels: Sequence[str] = ()) -> str:
        """Return the text of a prompt with image placeholders, as the processor takes it."""
        content = [*_build_image_parts(images, labels), {"type": "text", "text": question + self.suffix}]
        chat = [{"role": "user", "content": content}]
        return self.processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)

    def video_inputs(self, frames: Sequence[Image.Image], question: str) -> dict[str, Any]:
        """Return the model's arguments for one question about a video. All frames are used.

        Raises:
            DataError: If the frames differ in size, or the processor rejects them.
        """
        try:
            check_sizes(frames)
        except RowError as error:
            raise DataError(f"Cannot use the video of {question!r}: {error}.") from error
        video = np.stack([np.asarray(frame.convert("RGB")) for frame in frames])
        return self._process([[{"type": "video", "video": video}]], [question], do_sample_frames=False)

    def _process(self, media: list[list[dict[str, Any]]], questions: Sequence[str], **settings: Any) -> dict[str, Any]:
        contents = [
            [*row, {"type": "text", "text": question + self.suffix}]
            for row, question in zip(media, questions, strict=True)
        ]
        try:
            inputs = self.processor.apply_chat_template(
                [[{"role": "user", "content": content}] for content in contents],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                processor_kwargs={"padding": True, "return_tensors": "pt", **settings},
            )
        except TokenPruneError:
            raise  # raised by a method on pixels
        except ValueError as error:
            if len(questions) > 1:
                for row, question in zip(media, questions, strict=True):
                    self._process([row], [question], **settings)  # raises for the invalid row
            texts = "; ".join(map(repr, questions))
            raise DataError(f"The processor of {self.name} rejects the image of {texts}: {error}") from error
        dtype = self.model.dtype
        return {
            name: value.to(self.model.device, dtype if value.is_floating_point() else None)
            for name, value in inputs.items()
            if isinstance(value, torch.Tensor)
        }

    def generate(self, inputs: dict[str, Any], **options: Any) -> list[str]:
        """Return the greedy answer of each row without special tokens."""
        options = {"max_new_tokens": self.max_new_tokens} | options
        output = self.model.generate(**inputs, do_sample=False, num_beams=1, **options)
        answers = self.processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return [answer.strip() for answer in answers]

    def visual_tokens(self, inputs: dict[str, Any]) -> int:
        """Return the number of visual tokens that enter the decoder."""
        return sum(int(mask.sum()) for mask in self.adapter.visual_mask(inputs).values())

    def environment(self) -> dict[str, Any]:
        """Describe model, machine and versions as plain values, without local paths."""
        device = self.model.device
        text_config: Any = self.adapter.text_config
        return {
            "model": self.name,
            "model_type": self.model.config.model_type,
            "weights": self.weights,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "attention": text_config._attn_implementation,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenprune": sys.modules["tokenprune"].__version__,  # importing tokenprune would be circular
        }


def demo_model(name: str = "demo_vlm", *, device: str | None = None) -> tuple[Any, Any]:
    """Return (model, processor) of a model of tokenprune-demo, ready for `patch`. Nothing is downloaded.

    Args:
        name: "demo_vlm", a LLaVA with 4.5 M parameters, or "demo_qwen", a Qwen2.5-VL with 4.8 M; both answer questions
            about drawn scenes in one word. "demo_video" is demo_qwen trained further on drawn videos. "demo_smol" is a
            LLaVA with the pretrained decoder SmolLM2-135M; it answers in a sentence and needs another package.
        device: Torch device. None selects a CUDA device if there is one.

    Raises:
        OptionError: If the name is not known.
        MissingPackageError: If tokenprune-demo is not installed.

    Examples:
        >>> model, processor = tokenprune.demo_model("demo_vlm", device="cpu")
        >>> model.config.model_type
        'llava'
    """
    if name not in SHIPPED:
        raise OptionError(f"{name!r} is not a model of tokenprune-demo. Use one of {', '.join(SHIPPED)}.")
    subject = load_model(name, device=device)
    return subject.model, subject.processor


def _build_image_parts(images: Sequence[Any], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return images as chat parts, each after its label if there are labels."""
    parts = [{"type": "image", "image": image} for image in images]
    if not labels:
        return parts
    texts = [{"type": "text", "text": label} for label in labels]
    return [part for pair in zip(texts, parts, strict=True) for part in pair]


def load_model(
    model: str | None = None, *, device: str | None = None, dtype: str = "auto", suffix: str | None = None
) -> Model:
    """Load a shipped model, or a model from a local directory or hub id.

    Args:
        model: Name of a shipped model (see `SHIPPED`), directory or hub id. None selects "demo_vlm".
        device: Torch device. None selects a CUDA device if there is one.
        dtype: "auto" or the name of a torch dtype.
        suffix: Text added to every question. None selects no text for shipped models and `SHORT` for others.

    Raises:
        TokenPruneError: If the model cannot be loaded.
        UnsupportedModelError: If the model cannot be patched.

    Examples:
        >>> subject = load_model("demo_vlm", device="cpu")
        >>> inputs = subject.inputs([image], ["what color is the star?"])
        >>> subject.visual_tokens(inputs)
        256
    """
    name = model or SHIPPED[0]
    shipped = get_shipped_checkpoint(name)
    source = str(model if shipped is None else shipped)
    if shipped is not None and not (shipped / "model.safetensors").is_file():
        raise TokenPruneError("The shipped model is not installed. Name another model with --model.")
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise TokenPruneError(f"{dtype!r} is not a torch dtype. Use auto, float32, bfloat16 or float16.")
    check_source(source)
    try:
        torch_dtype = dtype if dtype == "auto" else getattr(torch, dtype)
        loaded = AutoModelForImageTextToText.from_pretrained(source, dtype=torch_dtype)
        processor = AutoProcessor.from_pretrained(source)
    except (OSError, ValueError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, ImportError) and "torchvision" in str(error).lower():
            reason = "its processor needs torchvision: pip install torchvision"
        raise TokenPruneError(f"cannot load {model or 'the shipped model'}: {reason}") from error
    if getattr(processor, "chat_template", None) is None:
        raise TokenPruneError(f"The processor of {model} lacks a chat template, which the benchmark needs.")
    processor.tokenizer.padding_side = "left"
    try:
        loaded = loaded.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
    except (RuntimeError, AssertionError) as error:
        raise TokenPruneError(f"cannot use device {device!r}: {str(error).splitlines()[0]}") from error
    if shipped is not None:
        # Hash the shipped file: a checkpoint built from it differs between CPUs in the last bits.
        (file,) = (get_shipped_folder(name) or shipped).glob("*.safetensors")
        digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        heldout = require("tokenprune_demo.heldout", "held-out questions").get_heldout_folder(name)
        subject = Model(loaded, processor, f"{name} (shipped)", suffix or "", weights=digest, heldout=heldout)
        if (longest := get_max_answer_tokens(name)) is not None:
            subject.max_new_tokens, subject.metric = longest, "ending"
    else:
        title = Path(source).resolve().name if Path(source).is_dir() else source
        subject = Model(loaded, processor, title, SHORT if suffix is None else suffix, max_new_tokens=16)
    _ = subject.adapter  # raises early for unsupported models
    return subject
