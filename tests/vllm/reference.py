# SPDX-License-Identifier: Apache-2.0
"""Expected answers: the patched Hugging Face model, greedy, without a cache.

Models with M-RoPE keep the positions of the unpruned prompt on both sides. With one axis of positions, vLLM numbers the
kept tokens consecutively, unless the server's setting has `"positions": "original"`. The reference does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

import tokenprune
from checkpoints import Checkpoint
from tokenprune.integrations.vllm.settings.towers import drops_by_pixels

Choice = Callable[[Tensor, list[int]], int]


class Reference:
    """A checkpoint in transformers."""

    def __init__(self, checkpoint: Checkpoint, folder: Any) -> None:
        from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

        self.checkpoint = checkpoint
        config = AutoConfig.from_pretrained(folder)
        if checkpoint.name == "paligemma":
            config.text_config.use_bidirectional_attention = False  # attention is causal in vLLM on a CPU
        self.model = AutoModelForImageTextToText.from_pretrained(folder, config=config).float().eval()
        self.processor = AutoProcessor.from_pretrained(folder)

    def inputs(self, prompt: str, images: list[Any], videos: Sequence[Any] = ()) -> dict[str, Any]:
        nested = self.checkpoint.name in ("smolvlm", "idefics3", "gemma3")
        kwargs: dict[str, Any] = {}
        if images:
            kwargs["images"] = [images] if nested else images
        if videos:
            frames = [video[0] if isinstance(video, tuple) else video for video in videos]
            kwargs["videos"] = [torch.from_numpy(clip).permute(0, 3, 1, 2) for clip in frames]
            kwargs["do_sample_frames"] = False
            if isinstance(videos[0], tuple):
                kwargs["video_metadata"] = [_without_wish(metadata) for _, metadata in videos]
        inputs = dict(self.processor(text=[prompt], return_tensors="pt", **kwargs))
        if self.checkpoint.name == "gemma3":
            # In vLLM on a CPU, attention within an image is causal, pruned or not.
            inputs["token_type_ids"] = torch.zeros_like(inputs["token_type_ids"])
        if self.checkpoint.name == "paligemma":
            inputs.pop("token_type_ids")  # they would make attention in the prefix bidirectional
            inputs.pop("labels", None)
        return inputs

    def patched(self, setting: dict[str, Any] | None) -> AbstractContextManager:
        """Patch the model with a server's setting, or leave it unpatched for None."""
        if setting is None or setting.get("off"):
            return nullcontext()
        rest = {key: value for key, value in setting.items() if key not in ("method", "keep", "per")}
        entries = setting["method"] if isinstance(setting["method"], list) else [{"method": setting["method"]} | rest]
        named = [entry if isinstance(entry, dict) else {"method": entry} for entry in entries]
        methods = [
            tokenprune.method(entry["method"], **{k: v for k, v in entry.items() if k != "method"}) for entry in named
        ]
        keep = setting["keep"]
        if isinstance(keep, dict):
            keep = tokenprune.Budget.from_json(keep)
        if "per" in setting:
            keep = tokenprune.Budget(keep=keep, per=setting["per"])
        pixels = any(method.site is tokenprune.Site.PRE_ENCODER or drops_by_pixels(method) for method in methods)
        return tokenprune.patched(self.model, methods, keep=keep, processor=self.processor if pixels else None)

    def prompt_ids(
        self, prompt: str, images: list[Any], setting: dict[str, Any] | None = None, videos: Sequence[Any] = ()
    ) -> list[int]:
        """Return the token ids of the prompt, patched if a setting is given."""
        with self.patched(setting):
            return self.inputs(prompt, images, videos)["input_ids"][0].tolist()

    @torch.no_grad()
    def greedy(
        self, prompt: str, images: list[Any], steps: int, setting: dict[str, Any] | None, videos: Sequence[Any] = (),
        original: bool = False, choose: Choice = lambda logprobs, generated: int(logprobs.argmax()),
    ) -> tuple[list[int], Tensor]:  # fmt: skip
        """Return the generated tokens and their log-probabilities, shape (steps, vocabulary).

        Args:
            original: Whether to keep the positions of the unpruned prompt on one axis, too.
            choose: Picks the next token, given its log-probabilities and the tokens generated so far.
        """
        tokens, logprobs = [], []
        with ExitStack() as stack:
            stack.enter_context(self.patched(setting))
            inputs = self.inputs(prompt, images, videos)
            if not (self.checkpoint.mrope or original):
                stack.callback(self._count_from_zero().remove)
            for _ in range(steps):
                logits = self.model(**inputs, use_cache=False).logits[0, -1].float()
                logprobs.append(logits.log_softmax(-1))
                tokens.append(choose(logprobs[-1], tokens))
                inputs = _longer(inputs, tokens[-1])
        return tokens, torch.stack(logprobs)

    @torch.no_grad()
    def generate(
        self, prompt: str, images: list[Any], steps: int, setting: dict[str, Any] | None
    ) -> tuple[list[int], Tensor]:
        """Do the same with `generate` and a cache. The decoder drops tokens only at prefill, and tokens keep their
        positions.
        """
        inputs = self.inputs(prompt, images)
        self.model.generation_config.eos_token_id = None
        with ExitStack() as stack:
            if setting is not None:
                stack.enter_context(tokenprune.patched(self.model, **setting))
            output = self.model.generate(
                **inputs, max_new_tokens=steps, do_sample=False, output_logits=True, return_dict_in_generate=True
            )
        tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens, torch.stack(output.logits).float().log_softmax(-1)[:, 0]

    def _count_from_zero(self) -> Any:
        from tokenprune.integrations.hf.families import get_adapter

        def count(module: Any, args: tuple, kwargs: dict) -> tuple:
            length = kwargs["inputs_embeds"].shape[1]
            return args, kwargs | {"position_ids": torch.arange(length)[None]}

        decoder = get_adapter(self.model).decoder
        return decoder.register_forward_pre_hook(count, with_kwargs=True)


def _without_wish(metadata: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key != "do_sample_frames"}


def _longer(inputs: dict[str, Any], token: int) -> dict[str, Any]:
    grown = dict(inputs)
    for name, value in (
        ("input_ids", token), ("attention_mask", 1), ("mm_token_type_ids", 0), ("token_type_ids", 0)
    ):  # fmt: skip
        if name in grown:
            more = torch.tensor([[value]], dtype=grown[name].dtype)
            grown[name] = torch.cat([grown[name], more], dim=1)
    return grown
