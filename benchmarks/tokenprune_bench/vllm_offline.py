# SPDX-License-Identifier: Apache-2.0
"""vLLM in this process, by its offline API."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tokenprune.errors import OptionError, TokenPruneError
from tokenprune.integrations.vllm.settings.keys import KEY
from tokenprune.models.model_config import shipped_folder
from tokenprune_bench.errors import RunError
from tokenprune_bench.vllm_backend import OFF, Chat, Reply, adds_special

_OURS = {
    "model": "name it with --model",
    "dtype": "name it with --dtype",
    "disable_log_stats": "times are read from vLLM's statistics",
}
_COUNTER = "tokenprune:visual_tokens_total"


class OfflineEngine:
    """`vllm.LLM` with one model, started so that requests can choose their setting.

    model: a directory or hub id; None: the shipped model. arguments: of `vllm.LLM`. images: the most that a question
    has. Raises OptionError for arguments that are not the caller's to give, TokenPruneError if vLLM is not installed,
    does not start, or did not load the plugin.
    """

    def __init__(
        self, model: str | None, dtype: str = "auto", arguments: dict[str, Any] | None = None, images: int = 1
    ) -> None:
        self._arguments = dict(arguments or {})
        kwargs = self._arguments.get("mm_processor_kwargs") or {}
        for name, instead in _OURS.items():
            if name in self._arguments:
                raise OptionError(f"--engine-args cannot hold {name}: {instead}")
        if KEY in kwargs:
            raise OptionError(
                f"--engine-args cannot hold a {KEY} setting: methods and keeps are those of the benchmark"
            )
        # A table is printed to stdout, and vLLM logs there.
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        try:
            from vllm import LLM
        except ImportError as error:
            raise TokenPruneError(
                "--backend vllm needs vLLM (pip install 'tokenprune-vlm[vllm]'), or the address of a server: --server"
            ) from error
        from tokenprune.integrations.vllm.settings.configuration import get_server_setting

        options = {
            "limit_mm_per_prompt": {"image": images},
            **self._arguments,
            "mm_processor_kwargs": {**kwargs, KEY: OFF},
            "dtype": dtype,
            "disable_log_stats": False,
        }
        self._folder = Path(model) if model is not None and Path(model).is_dir() else None
        self.name = "demo_vlm (shipped)" if model is None else self._folder.resolve().name if self._folder else model
        try:
            if model is None:
                # As transformers load it; vLLM would take half of float32's bits.
                options["dtype"] = "float32" if dtype == "auto" else dtype
                self._place = tempfile.TemporaryDirectory()  # for as long as this object lives
                model = str(_write_shipped(Path(self._place.name)))
            self._digest = _digest(Path(model)) if Path(model).is_dir() else model
            self.llm = LLM(model, **options)
        except TokenPruneError:
            raise
        except Exception as error:  # whatever vLLM's parts raise
            raise TokenPruneError(f"vLLM cannot serve {self.name}: {_message_of(error)}") from error
        if get_server_setting(self.llm.model_config) is None:
            self.close()
            raise TokenPruneError(
                "vLLM started without tokenprune's plugin: install tokenprune-vlm where vLLM is, and leave "
                "VLLM_PLUGINS unset, or name tokenprune in it"
            )
        self.config = self.llm.model_config.hf_config
        cache = self.llm.llm_engine.vllm_config.cache_config.cache_dtype
        self.number_bytes = 1 if cache.startswith("fp8") else self.llm.model_config.dtype.itemsize
        self._special = adds_special(self._plain)

    def ask(self, chats: Sequence[Chat], setting: dict[str, Any], max_tokens: int) -> list[Reply]:
        outputs = self._run([_messages(chat) for chat in chats], setting, max_tokens=max_tokens)
        return [Reply(output.outputs[0].text, len(output.prompt_token_ids)) for output in outputs]

    def clock(self, chat: Chat, setting: dict[str, Any], tokens: int) -> tuple[float, float]:
        messages = [_messages(chat)]
        self.llm.reset_prefix_cache()  # of the text before the image
        begin = time.perf_counter()
        (output,) = self._run(messages, setting, max_tokens=tokens, ignore_eos=True)
        took = time.perf_counter() - begin
        later = output.metrics.last_token_ts - output.metrics.first_token_ts
        return 1000 * (took - later), 1000 * later / (tokens - 1)

    def counted(self) -> tuple[int, int]:
        from prometheus_client import REGISTRY

        sums, name = {"in": 0.0, "out": 0.0}, self.llm.model_config.served_model_name
        for sample in (one for metric in REGISTRY.collect() for one in metric.samples):
            if sample.name == _COUNTER and sample.labels["model_name"] == name:  # whatever the method
                sums[sample.labels["stage"]] += sample.value
        return int(sums["in"]), int(sums["out"])

    def check(self, chat: Chat) -> None:
        pass  # that the plugin is there was seen at the start

    def environment(self) -> dict[str, Any]:
        import transformers
        from vllm.platforms import current_platform

        from tokenprune.integrations.vllm.compat import vllm_version

        return {
            "model": self.name,
            "engine_args": self._arguments,
            "device": current_platform.get_device_name(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "dtype": str(self.llm.model_config.dtype).removeprefix("torch."),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "vllm": vllm_version(),
        }

    def fingerprint(self) -> str:
        return self._digest

    def close(self) -> None:
        """End the engine and its processes."""
        self.llm.llm_engine.engine_core.shutdown()

    def _run(self, messages: list[list[dict[str, Any]]], setting: dict[str, Any] | None, **options: Any) -> list[Any]:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        # What the model's generation config says of repetition counts in transformers' `generate`, too.
        penalty = self.llm.get_default_sampling_params().repetition_penalty
        parameters = SamplingParams(temperature=0.0, repetition_penalty=penalty, **options)
        try:
            return self.llm.chat(
                messages,
                parameters,
                use_tqdm=False,
                chat_template_content_format="openai",
                tokenization_kwargs={"add_special_tokens": self._special},
                mm_processor_kwargs=setting and {KEY: setting},
            )
        except (EngineDeadError, EngineGenerateError) as error:
            raise RunError(f"vLLM's engine ended: {_message_of(error)}") from error
        except TokenPruneError:
            raise
        except (VLLMClientError, ValueError) as error:
            raise TokenPruneError(f"vLLM refused a request: {_message_of(error)}") from error

    def _plain(self, special: bool) -> list[int]:
        """Return the ids of a chat without images."""
        self._special = special
        (output,) = self._run([_messages(Chat((), "x"))], None, max_tokens=1)
        return list(output.prompt_token_ids)


def _messages(chat: Chat) -> list[dict[str, Any]]:
    images = [{"type": "image_pil", "image_pil": image} for image in chat.images]
    return [{"role": "user", "content": [*images, {"type": "text", "text": chat.text}]}]


def _write_shipped(folder: Path) -> Path:
    """Write the shipped model with its weights under the names that checkpoints of LLaVA have on the hub: vLLM knows no
    others."""
    from safetensors.torch import load_file, save_file

    shipped = shipped_folder("demo_vlm")
    if not (shipped / "model.safetensors").is_file():
        raise TokenPruneError("this installation lacks the shipped model; name another one with --model")
    for file in shipped.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(shipped / "model.safetensors")
    named = {re.sub(r"^vision_tower\.", "vision_tower.vision_model.", name): w for name, w in weights.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    return folder


def _digest(folder: Path) -> str:
    """Of the config and of samples of the weights."""
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("config.json"), *folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as opened:
            for place in range(0, size, max(1 << 16, size // 16)):
                opened.seek(place)
                digest.update(opened.read(1 << 12))
    return digest.hexdigest()[:32]


def _message_of(error: BaseException) -> str:
    """Return the message of an error in one line; of those that pydantic wraps, the inner one."""
    inner = getattr(error, "errors", None)
    if callable(inner):
        return "; ".join(one["msg"] for one in inner())
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
