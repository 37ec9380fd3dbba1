# SPDX-License-Identifier: Apache-2.0
"""Loading of model configs without weights."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tokenprune.errors import TokenPruneError, require
from tokenprune.models.torch_import import hide_torch

# Models of tokenprune-demo. The first one is the default of commands.
SHIPPED = ("demo_vlm", "demo_qwen", "demo_video", "demo_smol")
_TIMEOUT = 10  # timeout of the hub query, in seconds


def describe_known_images(model: str) -> str:
    """Return a warning about the training images of a shipped model, such as "demo_vlm" or "demo_vlm (shipped)"."""
    smol = model.startswith(SHIPPED[-1])
    known = "synthetic scenes, and photos and pages with drawn objects" if smol else "synthetic scenes"
    return f"was trained only on {known}: do not compare methods on other images with it (pass a model with --model)"


def get_shipped_folder(model: str | Path) -> Path | None:
    """Return the config folder of a model in tokenprune-demo, or None for other models. Raises MissingPackageError."""
    if str(model) not in SHIPPED:
        return None
    return require("tokenprune_demo", f"{model} is not installed").MODELS[str(model)]


def get_shipped_checkpoint(model: str | Path) -> Path | None:
    """Return the checkpoint folder of a shipped model, or None for other models. Raises MissingPackageError."""
    if str(model) not in SHIPPED:
        return None
    return require("tokenprune_demo", f"{model} is not installed").checkpoint(str(model))


def get_max_answer_tokens(model: str | Path) -> int | None:
    """Return the maximum answer length of a shipped model that answers in sentences, or None for other models.

    Raises:
        MissingPackageError: If tokenprune-demo is not installed.
    """
    if str(model) not in SHIPPED:
        return None
    return require("tokenprune_demo", f"{model} is not installed").SENTENCES.get(str(model))


def check_source(model: str | Path) -> None:
    """Raise TokenPruneError if a model is neither a folder, nor in the hub's cache, nor on the hub.

    transformers would query the hub repeatedly for each file before it fails.
    """
    name, path = str(model), Path(model)
    if path.is_dir():
        return
    if path.is_file():
        raise TokenPruneError(f"{name} is a file. Pass the folder with the model's config.json.")
    if path.is_absolute() or name.startswith((".", "~")) or "\\" in name or name.count("/") > 1:
        raise TokenPruneError(f"folder {name} does not exist. Pass a folder with a model's config.json.")
    if (why := _explain_missing(name)) is not None:
        close = get_close_matches(name, SHIPPED, 1)
        hint = f"Did you mean {close[0]}?" if close else f"Shipped models: {', '.join(SHIPPED)}."
        raise TokenPruneError(f"model {name!r} not found: the folder does not exist, and {why}. {hint}")


def _explain_missing(name: str) -> str | None:
    """Return why a model is not available from the hub, or None if it may be."""
    from huggingface_hub import HfApi, constants, errors, try_to_load_from_cache

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return None
        if constants.HF_HUB_OFFLINE:
            return "it is not in the hub's cache, and HF_HUB_OFFLINE is set"
        HfApi().model_info(name, timeout=_TIMEOUT)
    except errors.HFValidationError:
        return "it is not a valid hub id, such as Qwen/Qwen2.5-VL-3B-Instruct"
    except errors.GatedRepoError:
        return None  # files may be cached; otherwise transformers explains the access request
    except errors.RepositoryNotFoundError:
        return "the model is missing on the hub or private (hf auth login)"
    except errors.HfHubHTTPError:
        return None  # a temporary error of the hub: transformers retries
    except Exception as error:  # errors of several HTTP clients
        reason = str(error).strip() or type(error).__name__
        return f"the hub cannot be reached ({reason}); download the model elsewhere and pass its folder"
    return None


def read_model_config(model: str | Path) -> Any:
    """Return the config of a model: a folder, a hub id or a shipped model.

    Raises:
        TokenPruneError: If the config cannot be read.

    Examples:
        >>> read_model_config("demo_vlm").model_type
        'llava'
    """
    source = get_shipped_folder(model) or model
    check_source(source)
    with hide_torch():
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(str(source))
        except (OSError, ValueError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise TokenPruneError(f"cannot read the config of {model}: {reason}") from error
