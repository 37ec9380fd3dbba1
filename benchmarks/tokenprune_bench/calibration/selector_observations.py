# SPDX-License-Identifier: Apache-2.0
"""Observed samples of the fit of `learned`, in memory or in a folder beside the fitted file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from tokenprune.errors import OptionError
from tokenprune.selection.files import describe_error, write_atomically
from tokenprune_bench.calibration.selector_targets import ObservedPrompt, measure, observe

_HEADER = "fit.json"


class ObservedPrompts:
    """The samples of a fit by index. Each is observed once.

    Args:
        model: The frozen model.
        arguments: Model arguments of prompts with images, one prompt each. Its attribute `sample_keys`, if any, is a
            text for each prompt that changes with its image and question.
        max_new_tokens: Maximum length of an answer.
        folder: Folder that stores the samples. None keeps them in memory.
        with_embeddings: Store the inputs of the decoder, which the targets "gradient" and "topk" need.
    """

    def __init__(
        self,
        model: Any,
        arguments: Sequence[dict[str, Any]],
        max_new_tokens: int,
        folder: Path | None = None,
        with_embeddings: bool = True,
    ) -> None:
        self.model, self.arguments, self.max_new_tokens = model, arguments, max_new_tokens
        self.folder, self.with_embeddings = folder, with_embeddings
        self.sample_keys: Sequence[str] | None = getattr(arguments, "sample_keys", None)
        self.samples: dict[int, ObservedPrompt | None] = {}
        self.device = model.get_input_embeddings().weight.device

    def __len__(self) -> int:
        return len(self.arguments)

    @property
    def digest(self) -> str | None:
        """Digest of the data. None if it is not known."""
        return None if self.sample_keys is None else hashlib.sha256("".join(self.sample_keys).encode()).hexdigest()

    def get(self, index: int, target: str) -> ObservedPrompt | None:
        """Return a sample with `target` on the model's device, or None if the prompt lacks images."""
        is_known, sample = self._read(index)
        if not is_known or (sample is not None and not sample.has(target)):
            sample = self._observe(index, target, sample)
            self._write(index, sample)
        return None if sample is None else sample.to(self.device)

    def _observe(self, index: int, target: str, sample: ObservedPrompt | None) -> ObservedPrompt | None:
        arguments = self.arguments[index]
        with_embeddings = self.with_embeddings or target != "attention"
        if sample is None or (with_embeddings and sample.embeddings is None):
            known = {} if sample is None else sample.targets
            sample = observe(self.model, arguments, self.max_new_tokens, with_embeddings)
            if sample is not None:
                sample.targets.update(known)
        if sample is None or sample.has(target):
            return sample
        sample = sample.to(self.device)
        sample.targets[target] = measure(target, self.model, arguments, sample)
        return sample

    def _get_path(self, index: int) -> Path:
        assert self.folder is not None  # checked by the callers
        name = f"{index:07}" if self.sample_keys is None else self.sample_keys[index]
        return self.folder / f"{name}.safetensors"

    def _read(self, index: int) -> tuple[bool, ObservedPrompt | None]:
        """Return whether the sample was observed, and the sample. A damaged file counts as not observed."""
        if self.folder is None:
            return index in self.samples, self.samples.get(index)
        try:
            tensors = load(self._get_path(index).read_bytes())
            return True, ObservedPrompt.from_tensors(tensors) if tensors else None
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            return False, None

    def _write(self, index: int, sample: ObservedPrompt | None) -> None:
        sample = None if sample is None else sample.to("cpu")
        if self.folder is None:
            self.samples[index] = sample
            return
        tensors = {} if sample is None else {name: value.contiguous() for name, value in sample.to_tensors().items()}
        write_atomically(self._get_path(index), save(tensors))

    def open(self, identity: dict[str, Any], restart: bool) -> None:
        """Create the folder, or check that its samples belong to this fit.

        Args:
            identity: Values of the fit that the samples depend on.
            restart: Remove the samples of an earlier fit.

        Raises:
            OptionError: If the folder belongs to another fit, or cannot be created.
        """
        if self.folder is None:
            return
        header = self.folder / _HEADER
        if restart:
            self.remove()
        try:
            self.folder.mkdir(exist_ok=True)
            stored = json.loads(header.read_text()) if header.exists() else None
        except (OSError, ValueError) as error:
            raise OptionError(f"cannot use {self.folder}: {describe_error(error)}. Delete it.") from error
        if stored is None:
            write_atomically(header, json.dumps(identity).encode())
        else:
            check_identity(self.folder, stored, identity)

    def remove(self) -> None:
        """Delete the stored samples."""
        if self.folder is None or not self.folder.is_dir():
            return
        for path in [*self.folder.glob("*.safetensors"), self.folder / _HEADER]:
            path.unlink(missing_ok=True)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()


def check_identity(path: Path, stored: Any, identity: dict[str, Any]) -> None:
    """Raise OptionError if the stored state of a fit belongs to another fit."""
    known = stored if isinstance(stored, dict) else {}
    other = [name for name, value in identity.items() if known.get(name) != value]
    if other:
        raise OptionError(
            f"{path} belongs to a fit with other {', '.join(other)}. Delete it, or pass restart=True (--restart)."
        )
