# SPDX-License-Identifier: Apache-2.0
"""vLLM engine in this process, with vLLM's offline API."""

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
from tokenprune.models.model_config import get_shipped_folder
from tokenprune_bench.errors import RunError
from tokenprune_bench.vllm_backend import OFF, Chat, Reply, build_image_url, needs_special_tokens

_OURS = {
    "model": "name it with --model",
    "dtype": "name it with --dtype",
    "disable_log_stats": "times are read from vLLM's statistics",
}
_COUNTER = "tokenprune:visual_tokens_total"


class OfflineEngine:
    """`vllm.LLM` with one model, configured so that each request can carry a setting.

    Args:
        model: Directory or hub id. None selects the shipped model.
        dtype: Name of a dtype, or "auto".
        arguments: Arguments of `vllm.LLM`.
        images: Maximum number of images per question.

    Raises:
        OptionError: If `arguments` has a reserved argument.
        TokenPruneError: If vLLM is not installed, does not start, or did not load the plugin.
    """

    def __init__(
        self, model: str | None, dtype: str = "auto", arguments: dict[str, Any] | None = None, images: int = 1
    ) -> None:
        self._arguments = dict(arguments or {})
        kwargs = self._arguments.get("mm_processor_kwargs") or {}
        for name, instead in _OURS.items():
            if name in self._arguments:
                raise OptionError(f"--engine-args cannot set {name}: {instead}.")
        if KEY in kwargs:
            raise OptionError(f"--engine-args cannot set {KEY}: the benchmark sets methods and keeps.")
        # vLLM logs to stdout by default, but the tables are printed there.
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        try:
            from vllm import LLM
        except ImportError as error:
            raise TokenPruneError(
                "--backend vllm needs vLLM (pip install 'tokenprune-vlm[vllm]'), or a server (--server)."
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
                # As in transformers. vLLM would load float32 weights in half precision.
                options["dtype"] = "float32" if dtype == "auto" else dtype
                self._directory = tempfile.TemporaryDirectory()  # lives as long as this object
                model = str(_write_shipped(Path(self._directory.name)))
            self._digest = _digest(Path(model)) if Path(model).is_dir() else model
            self.llm = LLM(model, **options)
        except TokenPruneError:
            raise
        except Exception as error:  # vLLM raises many error types
            raise TokenPruneError(f"vLLM cannot serve {self.name}: {_format_error(error)}.") from error
        if get_server_setting(self.llm.model_config) is None:
            self.close()
            raise TokenPruneError(
                "vLLM started without tokenprune's plugin. Install tokenprune-vlm in vLLM's environment, and unset "
                "VLLM_PLUGINS or add tokenprune to it."
            )
        self.config = self.llm.model_config.hf_config
        cache = self.llm.llm_engine.vllm_config.cache_config.cache_dtype
        self.bytes_per_value = 1 if cache.startswith("fp8") else self.llm.model_config.dtype.itemsize
        self._special = needs_special_tokens(self._plain)

    def ask(self, chats: Sequence[Chat], setting: dict[str, Any], max_tokens: int) -> list[Reply]:
        outputs = self._run([_build_messages(chat) for chat in chats], setting, max_tokens=max_tokens)
        return [Reply(output.outputs[0].text, len(output.prompt_token_ids)) for output in outputs]

    def clock(self, chat: Chat, setting: dict[str, Any], tokens: int) -> tuple[float, float]:
        messages = [_build_messages(chat)]
        self.llm.reset_prefix_cache()  # the text before the image would be cached
        begin = time.perf_counter()
        (output,) = self._run(messages, setting, max_tokens=tokens, ignore_eos=True)
        took = time.perf_counter() - begin
        later = output.metrics.last_token_ts - output.metrics.first_token_ts
        return 1000 * (took - later), 1000 * later / (tokens - 1)

    def count_visual_tokens(self) -> tuple[int, int]:
        from prometheus_client import REGISTRY

        sums, name = {"in": 0.0, "out": 0.0}, self.llm.model_config.served_model_name
        for sample in (sample for metric in REGISTRY.collect() for sample in metric.samples):
            if sample.name == _COUNTER and sample.labels["model_name"] == name:  # whatever the method
                sums[sample.labels["stage"]] += sample.value
        return int(sums["in"]), int(sums["out"])

    def check(self, chat: Chat) -> None:
        pass  # the constructor has checked the plugin

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
        """Stop the engine and its processes."""
        self.llm.llm_engine.engine_core.shutdown()

    def _run(self, messages: list[list[dict[str, Any]]], setting: dict[str, Any] | None, **options: Any) -> list[Any]:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        # transformers' `generate` also uses the repetition penalty of the generation config.
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
            raise RunError(f"vLLM's engine stopped: {_format_error(error)}.") from error
        except TokenPruneError:
            raise
        except (VLLMClientError, ValueError) as error:
            raise TokenPruneError(f"vLLM rejected a request: {_format_error(error)}.") from error

    def _plain(self, special: bool) -> list[int]:
        """Return the ids of a chat without images."""
        self._special = special
        (output,) = self._run([_build_messages(Chat((), "x"))], None, max_tokens=1)
        return list(output.prompt_token_ids)


def _build_messages(chat: Chat) -> list[dict[str, Any]]:
    images = [
        build_image_url("jpeg", image) if isinstance(image, bytes) else {"type": "image_pil", "image_pil": image}
        for image in chat.images
    ]
    return [{"role": "user", "content": [*images, {"type": "text", "text": chat.text}]}]


def _write_shipped(folder: Path) -> Path:
    """Write the shipped model with the weight names of LLaVA checkpoints on the hub, which vLLM requires."""
    from safetensors.torch import load_file, save_file

    shipped = get_shipped_folder("demo_vlm")
    if not (shipped / "model.safetensors").is_file():
        raise TokenPruneError("The shipped model is not installed. Name another model with --model.")
    for file in shipped.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(shipped / "model.safetensors")
    named = {re.sub(r"^vision_tower\.", "vision_tower.vision_model.", name): w for name, w in weights.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    return folder


def _digest(folder: Path) -> str:
    """Hash the config and samples of the weights."""
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("config.json"), *folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as opened:
            for offset in range(0, size, max(1 << 16, size // 16)):
                opened.seek(offset)
                digest.update(opened.read(1 << 12))
    return digest.hexdigest()[:32]


def _format_error(error: BaseException) -> str:
    """Return the message of an error in one line. For pydantic errors, return the inner message."""
    inner = getattr(error, "errors", None)
    if callable(inner):
        return "; ".join(detail["msg"] for detail in inner())
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
