# SPDX-License-Identifier: Apache-2.0
"""Sessions: a bounded visual memory for hours of frames. A question costs only its own tokens."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import torch
from annotated_types import Ge, Gt, Le

from tokenprune.errors import BudgetError, ConfigError, OptionError, SessionError, UnsupportedSetupError
from tokenprune.integrations.hf.processor_check import check_processor
from tokenprune.integrations.hf.sessions import storage
from tokenprune.integrations.hf.sessions.anchors import check_reanchor
from tokenprune.integrations.hf.sessions.blocks import iter_blocks
from tokenprune.integrations.hf.sessions.checks import check_patch, check_window, get_placement, get_session_adapter
from tokenprune.integrations.hf.sessions.limits import Limits, count_entries
from tokenprune.integrations.hf.sessions.policies.registry import load_policy, resolve_policy
from tokenprune.integrations.hf.sessions.prompts import PromptWriter, as_frames
from tokenprune.integrations.hf.sessions.proxy import get_proxy_ids
from tokenprune.integrations.hf.sessions.results import Answer, HeldEntries, SessionStats, compute_stats, list_entries
from tokenprune.integrations.hf.sessions.stream import Stream
from tokenprune.integrations.shared.attachment import get_attachment, is_patched
from tokenprune.selection.options import describe_type, matches_type

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from tokenprune.integrations.hf.sessions.policies.base import Policy


class Session:
    """A stream of images and text with a bounded number of visual tokens in its cache.

    Create it with `tokenprune.sessions.session`. It is a context manager, and does not change the model. A session
    serves one thread at a time: concurrent calls raise SessionError. Several sessions on one model are independent.

    Args:
        stream: Stream of the session.
        writer: Writes text prompts. None for a session without a processor.
        block: Number of frames of a block, or None.

    Examples:
        >>> with tokenprune.sessions.session(model, processor, memory=512) as session:
        ...     answer = session.see(image).ask("What color is the bar?", max_new_tokens=2)
        >>> isinstance(answer, str)
        True
    """

    def __init__(self, stream: Stream, writer: PromptWriter | None, block: int | None) -> None:
        self._stream, self._prompt_writer, self._block = stream, writer, block
        self._patch = _describe_patch(stream.model)
        self._lock = threading.Lock()

    def see(self, frames: Any = None, *, fps: float | None = None, **inputs: Any) -> Session:
        """Process frames, and compress the memory if it is full. A failed call does not change the session.

        Args:
            frames: An image or a list of images, which become images of the user's turn. Or an array or tensor of shape
                (frames, height, width, 3) or (frames, 3, height, width), with uint8 values or floats in [0, 1], which
                becomes a video if the model supports videos.
            fps: Frames per second of a video, or None for the default of the processor.
            **inputs: Model inputs of one block (`input_ids`, `pixel_values`, ...) instead of `frames`.

        Returns:
            The session.

        Raises:
            SessionError: If there are no frames, or the processor does not accept them.
            OptionError: If `fps` is not valid.
            BudgetError: If a block is larger than the memory.
            UnsupportedSetupError: If a position is beyond the horizon.
        """
        if (frames is None) == (not inputs):
            raise SessionError("There are no frames. Pass frames, or input_ids and pixel_values.")
        if not matches_type(fps, Annotated[float, Gt(0)] | None):
            raise OptionError(f"fps={fps!r} must be a positive float (frames per second), or None")
        with self._enter_call(), self._stream.transaction():
            if inputs:
                self._stream.see(_to_row(inputs.get("input_ids")), inputs)
                self._stream.record_shown()
                return self
            video = not isinstance(frames, (list, tuple)) and getattr(frames, "ndim", 0) == 4
            images = as_frames(frames)
            if not self._stream.progress.opened:
                self._stream.say(self._writer.encode_opening())
            for block in iter_blocks(images, self._writer, self._stream, self._block, fps, video):
                self._stream.see(block["input_ids"], block)
            self._stream.record_shown(len(images))
        return self

    def say(self, text: str | Sequence[int] | Tensor) -> Session:
        """Add text of the user to the stream. Text is never dropped.

        Args:
            text: Text, or token ids without a template.

        Returns:
            The session.
        """
        with self._enter_call(), self._stream.transaction():
            self._stream.say(self._encode(text))
            self._stream.record_shown()
        return self

    def ask(
        self,
        text: str | Sequence[int] | Tensor,
        *,
        max_new_tokens: int = 64,
        attend: float | int = 1.0,
        remember: bool = False,
        return_dict: bool = False,
        **options: Any,
    ) -> Any:
        """Answer a question. The stream does not change unless `remember` is True.

        Args:
            text: The question, or its token ids without a template.
            max_new_tokens: Maximum number of answer tokens.
            attend: Share or number of the visual tokens that each layer reads for all answer tokens but the first. The
                tokens with the most attention from the question are read, as in SparseVILA (arXiv 2510.17777). This is
                a reconstruction from the abstract and from third-party code.
            remember: Whether to add the question and the answer to the stream as text.
            return_dict: Whether to return an `Answer` instead of a string.
            **options: Options of the model's `generate`. Decoding is greedy by default.

        Returns:
            The answer, as a string or an `Answer`.

        Raises:
            OptionError: If an option is not supported, such as beams, an assistant or another cache.
            BudgetError: If `attend` is out of range, or below a sliding window.
            UnsupportedSetupError: If a position is beyond the horizon.
        """
        if not matches_type(max_new_tokens, Annotated[int, Ge(1)]):
            raise OptionError(f"max_new_tokens={max_new_tokens!r} must be an int >= 1")
        if self._prompt_writer is None and not return_dict:
            raise SessionError("A session without a processor cannot decode its answer: pass return_dict=True")
        with self._enter_call():
            num_read = self._count_read(attend, options)
            ids = self._encode(text, closing=True)
            arguments = {"max_new_tokens": max_new_tokens, "do_sample": False, **options}
            answer_ids, logits = self._stream.ask(ids, arguments, num_read)
            if remember:
                after = self._writer.encode_reopening(answer_ids) if isinstance(text, str) else answer_ids[None]
                with self._stream.transaction():
                    self._stream.say(ids)
                    self._stream.say(after)
                    self._stream.record_shown()
        text_answer = None if self._prompt_writer is None else self._prompt_writer.decode(answer_ids)
        answer = Answer(text_answer, answer_ids, logits)
        return answer if return_dict else answer.text

    def reset(self) -> Session:
        """Clear the session, and return it."""
        with self._enter_call():
            self._stream.reset()
        return self

    def fork(self) -> Session:
        """Return an independent copy of the session. The copies share memory until one of them continues."""
        with self._enter_call():
            return Session(self._stream.fork(), self._prompt_writer, self._block)

    def save(self, path: str | Path) -> Session:
        """Write the session to a safetensors file, and return it. Raises ConfigError if that fails."""
        with self._enter_call():
            limits, policy = self._stream.limits, self._stream.policy
            settings = {
                "memory": limits.memory,
                "target": limits.share,
                "horizon": limits.horizon,
                "reanchor": limits.reanchor,
                "block": self._block,
                "patch": self._patch,
                "seed": self._stream.seed,
                "policy": {"name": policy.name, "options": dataclasses.asdict(policy)},
            }
            storage.save(self._stream, path, settings)
        return self

    @classmethod
    def load(cls, path: str | Path, model: Any, processor: Any = None) -> Session:
        """Load a session that `save` wrote. Its answers are bit-equal to the answers of the saved session.

        Args:
            path: Path of the file.
            model: The same model, with the same patch.
            processor: Processor of the model, or None.

        Raises:
            ConfigError: If the file cannot be read, is corrupt, or belongs to another model, patch or dtype.
            UnknownPolicyError: If the policy is not registered.
        """
        metadata, tensors = storage.load(path)
        settings = dict(metadata["settings"])
        try:
            policy, patch = load_policy(settings.pop("policy")), settings.pop("patch")
            loaded = session(model, processor, policy=policy, **settings)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{path} is corrupt: its settings are not valid") from error
        if loaded._patch != patch:
            raise ConfigError(
                f"{path} needs a model with {patch or 'no patch'}, not {loaded._patch or 'none'}. Patch it as before."
            )
        storage.restore(loaded._stream, metadata, tensors, str(path))
        return loaded

    @property
    def policy(self) -> Policy:
        """Policy that selects the visual entries to keep."""
        return self._stream.policy

    @property
    def stats(self) -> SessionStats:
        """Current statistics."""
        return compute_stats(self._stream)

    @property
    def held(self) -> list[HeldEntries]:
        """Entries of each layer with full attention."""
        return list_entries(self._stream)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.reset()

    def __repr__(self) -> str:
        return f"Session({type(self._stream.model).__name__}, {self.policy!r}: {self.stats})"

    @contextmanager
    def _enter_call(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise SessionError("Another call of this session is running. Wait for it, or use one session per thread.")
        try:
            if (patch := _describe_patch(self._stream.model)) != self._patch:
                raise UnsupportedSetupError(
                    f"The session began on a model with {self._patch or 'no patch'}, and the patch is now "
                    f"{patch or 'none'}. Restore it, or start a new session."
                )
            self._stream.check_model()
            yield
        finally:
            self._lock.release()

    @property
    def _writer(self) -> PromptWriter:
        if self._prompt_writer is None:
            raise SessionError(
                "A session without a processor needs token ids: say([...]), ask([...]) and see(input_ids=..., "
                "pixel_values=...). Or pass the processor to session(model, processor, ...)."
            )
        return self._prompt_writer

    def _count_read(self, attend: float | int, options: dict[str, Any]) -> int | None:
        """Return the number of visual entries that an answer reads, or None for all entries."""
        if not (matches_type(attend, Annotated[int, Ge(1)]) or matches_type(attend, Annotated[float, Gt(0), Le(1)])):
            raise BudgetError(f"attend={attend!r} must be a share of the visual tokens in (0, 1], or an int >= 1")
        held = self._stream.memory.visual
        num_read = attend if isinstance(attend, int) else max(1, round(attend * held))
        if num_read >= held:
            return None
        if options.get("prefill_chunk_size") is not None:
            raise OptionError("attend= needs the question in one forward. Leave out prefill_chunk_size.")
        check_window(self._stream.adapter, num_read, f"attend={attend!r} reads", "raise it to at least {window}")
        return num_read

    def _encode(self, text: Any, closing: bool = False) -> Tensor:
        """Return the token ids of a text, shape (1, tokens). With `closing` the turn of the user ends."""
        if not isinstance(text, str):
            return _to_row(text)
        if not text.strip():
            raise SessionError("the text is empty")
        opening = [] if self._stream.progress.opened else [self._writer.encode_opening()]
        return torch.cat([*opening, self._writer.encode_text(text, closing)], 1)


def session(
    model: Any,
    processor: Any = None,
    *,
    memory: int | str,
    policy: str | Policy = "window",
    target: float = 0.75,
    block: int | None = None,
    horizon: int | None = None,
    reanchor: bool | None = None,
    seed: int = 0,
) -> Session:
    """Start a session: `see` frames for hours and `ask` questions at any time, with a visual memory of fixed size.

    Args:
        model: Model in eval mode of a supported family (docs/guides/chats.md). It can be patched with PRE_LLM methods
            that do not read the question. They prune each block.
        processor: Processor of the model. None for a session that takes token ids and pixels.
        memory: Number of visual tokens per layer and KV head, with the tokens that wrap frames. Text is not counted and
            never dropped. Or bytes of all keys and values such as "2GiB", which include text.
        policy: Name of a policy (`available_policies()`), or a configured `Policy`.
        target: Share of the memory after a compression, in (0, 1]. 1 compresses at every block.
        block: Number of frames in one forward. None: as many as a compression makes room for.
        horizon: Largest position of the model. None: `max_position_embeddings` of its config.
        reanchor: Whether to move all positions down at the horizon. This closes gaps, which is an approximation. None:
            if the model supports it. False: raise an error at the horizon.
        seed: Seed of random policies.

    Returns:
        The session.

    Raises:
        BudgetError: If `memory` or `target` is not valid.
        OptionError: If another option is not valid.
        UnknownPolicyError: If the policy does not exist.
        SessionError: If the chat template is not supported.
        UnsupportedModelError: If sessions do not support the model.
        UnsupportedSetupError: If the model is patched, compiled or in training mode in an unsupported way.

    Examples:
        >>> session = tokenprune.sessions.session(model, processor, memory=512, policy="window")
        >>> session.see([image, image]).stats.frames_seen
        2
    """
    policy = resolve_policy(policy)
    if not matches_type(target, Annotated[float, Gt(0), Le(1)]):
        raise BudgetError(f"target={target!r} must be a share of the memory, in (0, 1]")
    for name, value in (("block", block), ("horizon", horizon)):
        if not matches_type(value, Annotated[int, Ge(1)] | None):
            raise OptionError(f"{name}={value!r} must be an int >= 1, or None")
    for name, value, kind in (("seed", seed, int), ("reanchor", reanchor, bool | None)):
        if not matches_type(value, kind):
            raise OptionError(f"{name}={value!r} must be {describe_type(kind)}")
    adapter = get_session_adapter(model)
    if is_patched(model):
        check_patch(get_attachment(model), adapter)
    horizon = horizon or adapter.text_config.max_position_embeddings - 1
    entries = count_entries(memory, adapter, get_placement(model)[1])
    limits = Limits(memory, entries, target, horizon, check_reanchor(adapter, reanchor))
    limits.check(0, policy.pinned)
    check_window(
        adapter,
        limits.target(0),
        "A compression keeps",
        "raise memory= or target= until their product is at least {window}",
    )
    check_processor(processor, adapter)
    writer = None if processor is None else PromptWriter(processor)
    proxy = get_proxy_ids(policy, writer, adapter)
    return Session(Stream(model, adapter, policy, limits, seed, proxy), writer, block)


def _describe_patch(model: Any) -> str:
    """Return a description of the model's patch, or an empty string."""
    return "; ".join(get_attachment(model).format_lines()) if is_patched(model) else ""


def _to_row(ids: Any) -> Tensor:
    """Convert token ids to shape (1, tokens), int64."""
    row = torch.as_tensor(ids if ids is not None else [], device="cpu")
    row = row[None] if row.ndim == 1 else row
    if row.ndim != 2 or len(row) != 1 or not row.shape[1] or row.is_floating_point():
        raise SessionError(f"Token ids of shape {list(row.shape)} are not one row. A session has a batch of 1.")
    return row.long()
