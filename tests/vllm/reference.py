# SPDX-License-Identifier: Apache-2.0
"""What vLLM has to say: the patched Hugging Face model, greedy, without a cache.

Models with M-RoPE keep the positions of the full prompt on both sides. Where positions have one axis, vLLM counts the
tokens that are there, unless the server's setting says `"positions": "original"`; so the decoder of the reference gets
consecutive positions.
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
            config.text_config.use_bidirectional_attention = False  # on CPU vLLM looks at what is before alone
        self.model = AutoModelForImageTextToText.from_pretrained(folder, config=config).float().eval()
        self.processor = AutoProcessor.from_pretrained(folder)

    def inputs(self, prompt: str, images: list[Any], videos: Sequence[Any] = ()) -> dict[str, Any]:
        many = self.checkpoint.name in ("smolvlm", "idefics3", "gemma3")
        kwargs: dict[str, Any] = {}
        if images:
            kwargs["images"] = [images] if many else images
        if videos:
            frames = [video[0] if isinstance(video, tuple) else video for video in videos]
            kwargs["videos"] = [torch.from_numpy(one).permute(0, 3, 1, 2) for one in frames]
            kwargs["do_sample_frames"] = False
            if isinstance(videos[0], tuple):
                kwargs["video_metadata"] = [_without_wish(metadata) for _, metadata in videos]
        made = dict(self.processor(text=[prompt], return_tensors="pt", **kwargs))
        if self.checkpoint.name == "gemma3":
            # On CPU vLLM lets tokens of an image see only what is before them, whether or not it is pruned.
            made["token_type_ids"] = torch.zeros_like(made["token_type_ids"])
        if self.checkpoint.name == "paligemma":
            made.pop("token_type_ids")  # they would have the prefix look both ways
            made.pop("labels", None)
        return made

    def patched(self, setting: dict[str, Any] | None) -> AbstractContextManager:
        """The model under a setting as a server takes it; None if it is as it was."""
        if setting is None or setting.get("off"):
            return nullcontext()
        rest = {key: value for key, value in setting.items() if key not in ("method", "keep", "per")}
        entries = setting["method"] if isinstance(setting["method"], list) else [{"method": setting["method"]} | rest]
        named = [one if isinstance(one, dict) else {"method": one} for one in entries]
        methods = [tokenprune.method(one["method"], **{k: v for k, v in one.items() if k != "method"}) for one in named]
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
        """The prompt as the processor writes it, patched if the setting says so."""
        with self.patched(setting):
            return self.inputs(prompt, images, videos)["input_ids"][0].tolist()

    @torch.no_grad()
    def greedy(
        self, prompt: str, images: list[Any], steps: int, setting: dict[str, Any] | None, videos: Sequence[Any] = (),
        original: bool = False, choose: Choice = lambda logprobs, written: int(logprobs.argmax()),
    ) -> tuple[list[int], Tensor]:  # fmt: skip
        """Tokens written, and the log-probabilities `[steps, V]` that they were chosen by. original: whether positions
        of one axis are those of the full prompt, too. choose: the next token, by its log-probabilities and the tokens
        written so far."""
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
        """The same by `generate`, with a cache: what is removed inside the model is chosen once, when the prompt is
        read, and all tokens keep their positions."""
        inputs = self.inputs(prompt, images)
        self.model.generation_config.eos_token_id = None
        with ExitStack() as stack:
            if setting is not None:
                stack.enter_context(tokenprune.patched(self.model, **setting))
            made = self.model.generate(
                **inputs, max_new_tokens=steps, do_sample=False, output_logits=True, return_dict_in_generate=True
            )
        tokens = made.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens, torch.stack(made.logits).float().log_softmax(-1)[:, 0]

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
