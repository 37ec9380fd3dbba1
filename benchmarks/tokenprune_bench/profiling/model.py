# SPDX-License-Identifier: Apache-2.0
"""The model under test: the shipped one, or any that AutoModelForImageTextToText and AutoProcessor can load."""

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
from tokenprune.integrations.hf.families import Adapter, adapter_for
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
from tokenprune_bench.profiling.media import BadRow, check_sizes

# Models that were not trained on our questions answer in sentences unless asked not to; LLaVA's own words for it.
SHORT = "\nAnswer the question using a single word or phrase."


@dataclass
class Model:
    """A model with its processor, and how questions are put to it.

    suffix: added to every question. heldout: folder of the held-out set of a shipped model. metric: the metric of
    tokenprune-bench that grades its answers unless another is asked for.
    """

    model: Any
    processor: Any
    name: str
    suffix: str = ""
    max_new_tokens: int = 4
    weights: str | None = None
    heldout: Path | None = None
    metric: str = "exact"

    def limits(self, files: Iterable[Path] = ()) -> str:
        """Return what has to be known of a shipped model's answers about images of others; "" of another model, and
        where all files are of its own held-out set."""
        files = [file.resolve() for file in files]
        if self.weights is None or (files and all(self.heldout in file.parents for file in files)):
            return ""
        return f"{self.name} {describe_known_images(self.name)}"

    @cached_property
    def adapter(self) -> Adapter:
        return adapter_for(self.model)

    @cached_property
    def shape(self) -> DecoderShape:
        return DecoderShape.from_config(self.adapter.text_config)

    def inputs(
        self,
        images: Sequence[Image.Image | Sequence[Any]],
        questions: Sequence[str],
        labels: Sequence[Sequence[str]] = (),
    ) -> dict[str, Any]:
        """Return the model's arguments for a left-padded batch, one image (or list of images) and one question a
        row. labels: for each row the text before each of its images, or none. Raises DataError for an image that the
        model's processor refuses."""
        rows = [row if isinstance(row, (list, tuple)) else [row] for row in images]
        said = labels or [()] * len(rows)
        return self._asked([_shown(row, texts) for row, texts in zip(rows, said, strict=True)], questions)

    def prompt(self, images: Sequence[Any], question: str, labels: Sequence[str] = ()) -> str:
        """Return the text of a prompt, with what stands for its images, as the processor takes it."""
        content = [*_shown(images, labels), {"type": "text", "text": question + self.suffix}]
        chat = [{"role": "user", "content": content}]
        return self.processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)

    def video_inputs(self, frames: Sequence[Image.Image], question: str) -> dict[str, Any]:
        """Return the model's arguments for one question about a video; all frames are taken. Raises DataError for
        frames of several sizes, and for what the model's processor refuses."""
        try:
            check_sizes(frames)
        except BadRow as error:
            raise DataError(f"{question!r} is about a video, and {error}") from error
        video = np.stack([np.asarray(frame.convert("RGB")) for frame in frames])
        return self._asked([[{"type": "video", "video": video}]], [question], do_sample_frames=False)

    def _asked(self, seen: list[list[dict[str, Any]]], questions: Sequence[str], **settings: Any) -> dict[str, Any]:
        contents = [
            [*row, {"type": "text", "text": question + self.suffix}]
            for row, question in zip(seen, questions, strict=True)
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
            raise  # of a method that acts on pixels
        except ValueError as error:
            if len(questions) > 1:
                for row, question in zip(seen, questions, strict=True):
                    self._asked([row], [question], **settings)  # raises for the one that is wrong
            asked = "; ".join(map(repr, questions))
            raise DataError(f"the processor of {self.name} takes no image of {asked}: {error}") from error
        dtype = self.model.dtype
        return {
            name: value.to(self.model.device, dtype if value.is_floating_point() else None)
            for name, value in inputs.items()
            if isinstance(value, torch.Tensor)
        }

    def generate(self, inputs: dict[str, Any], **options: Any) -> list[str]:
        """Return the greedy answers, one a row, without special tokens."""
        options = {"max_new_tokens": self.max_new_tokens} | options
        output = self.model.generate(**inputs, do_sample=False, num_beams=1, **options)
        answers = self.processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return [answer.strip() for answer in answers]

    def visual_tokens(self, inputs: dict[str, Any]) -> int:
        """Return how many visual tokens a batch hands to the decoder."""
        return sum(int(mask.sum()) for mask in self.adapter.visual_mask(inputs).values())

    def environment(self) -> dict[str, Any]:
        """Return what a reader needs to know about the run, as plain values; no path of this machine."""
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
            "tokenprune": sys.modules["tokenprune"].__version__,  # an import of it would close a circle
        }


def demo_model(name: str = "demo_vlm", *, device: str | None = None) -> tuple[Any, Any]:
    """Return (model, processor) of a model of tokenprune-demo, ready for `patch`; nothing is downloaded.

    name: "demo_vlm", a LLaVA of 4.5 M parameters, or "demo_qwen", a Qwen2.5-VL of 4.8 M, which answer questions about
    drawn scenes in a word; "demo_video", trained on from demo_qwen, answers those about drawn videos; "demo_smol", a
    LLaVA around the pretrained SmolLM2-135M, answers in a sentence and needs another package.
    device: where torch shall put it; default: a CUDA device if there is one.
    Raises OptionError for another name, MissingPackageError where tokenprune-demo is not installed.
    """
    if name not in SHIPPED:
        raise OptionError(f"no model {name!r} ships with tokenprune-demo: take one of {', '.join(SHIPPED)}")
    subject = load(name, device=device)
    return subject.model, subject.processor


def _shown(images: Sequence[Any], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return images as parts of a chat, each after its label where there are labels."""
    parts = [{"type": "image", "image": image} for image in images]
    if not labels:
        return parts
    texts = [{"type": "text", "text": label} for label in labels]
    return [part for pair in zip(texts, parts, strict=True) for part in pair]


def load(
    model: str | None = None, *, device: str | None = None, dtype: str = "auto", suffix: str | None = None
) -> Model:
    """Load a shipped model ("demo_vlm", the default, or another of `SHIPPED`), or a local directory or hub id.

    device: where torch shall put it; default: a CUDA device if there is one. dtype: "auto" or the name of a dtype.
    suffix: text added to every question; default: nothing for the shipped models, `SHORT` for others.
    Raises TokenPruneError where the model cannot be loaded, UnsupportedModelError where it cannot be patched.
    """
    name = model or SHIPPED[0]
    shipped = get_shipped_checkpoint(name)
    source = str(model if shipped is None else shipped)
    if shipped is not None and not (shipped / "model.safetensors").is_file():
        raise TokenPruneError("this installation lacks the shipped model; name another one with --model")
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise TokenPruneError(f"{dtype!r} is no torch dtype: use auto, float32, bfloat16 or float16")
    check_source(source)
    try:
        number = dtype if dtype == "auto" else getattr(torch, dtype)
        loaded = AutoModelForImageTextToText.from_pretrained(source, dtype=number)
        processor = AutoProcessor.from_pretrained(source)
    except (OSError, ValueError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, ImportError) and "torchvision" in str(error).lower():
            reason = "its processor needs torchvision: pip install torchvision"
        raise TokenPruneError(f"cannot load {model or 'the shipped model'}: {reason}") from error
    if getattr(processor, "chat_template", None) is None:
        raise TokenPruneError(f"the processor of {model} has no chat template, so questions cannot be put to it")
    processor.tokenizer.padding_side = "left"
    try:
        loaded = loaded.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
    except (RuntimeError, AssertionError) as error:
        raise TokenPruneError(f"cannot use device {device!r}: {str(error).splitlines()[0]}") from error
    if shipped is not None:
        # Of the file that ships: a checkpoint put together from it differs between processors in its last bits.
        (file,) = (get_shipped_folder(name) or shipped).glob("*.safetensors")
        digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        heldout = require("tokenprune_demo.heldout", "held-out questions").heldout_of(name)
        subject = Model(loaded, processor, f"{name} (shipped)", suffix or "", weights=digest, heldout=heldout)
        if (longest := get_max_answer_tokens(name)) is not None:
            subject.max_new_tokens, subject.metric = longest, "ending"
    else:
        title = Path(source).resolve().name if Path(source).is_dir() else source
        subject = Model(loaded, processor, title, SHORT if suffix is None else suffix, max_new_tokens=16)
    _ = subject.adapter  # an unsupported model is said here, before any work
    return subject
