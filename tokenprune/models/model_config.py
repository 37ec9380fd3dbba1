# SPDX-License-Identifier: Apache-2.0
"""Reading the config of a model, with the defaults of its family, without its weights."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tokenprune.errors import TokenPruneError, require
from tokenprune.models.torch_import import hide_torch

# Models of tokenprune-demo; the first is the default of commands.
SHIPPED = ("demo_vlm", "demo_qwen", "demo_video", "demo_smol")
_PATIENCE = 10  # seconds for the hub to say whether it has a model


def describe_known_images(model: str) -> str:
    """Return what has to be known of the answers of a model that ships, as "demo_vlm" or "demo_vlm (shipped)"."""
    smol = model.startswith(SHIPPED[-1])
    known = "drawn scenes, and photographs and pages with things drawn on them," if smol else "drawn scenes"
    return f"knows {known} only: what it answers about other images says nothing of a method; name a model with --model"


def get_shipped_folder(model: str | Path) -> Path | None:
    """Return the folder with the config of a model that tokenprune-demo brings, None for any other.

    Raises MissingPackageError.
    """
    if str(model) not in SHIPPED:
        return None
    return require("tokenprune_demo", f"{model} is a model of another package").MODELS[str(model)]


def get_shipped_checkpoint(model: str | Path) -> Path | None:
    """Return the folder with the whole checkpoint of such a model, None for any other. Raises MissingPackageError."""
    if str(model) not in SHIPPED:
        return None
    return require("tokenprune_demo", f"{model} is a model of another package").checkpoint(str(model))


def get_max_answer_tokens(model: str | Path) -> int | None:
    """Return the most tokens of an answer of a model that ships and answers in sentences, None for any other.

    Raises MissingPackageError.
    """
    if str(model) not in SHIPPED:
        return None
    return require("tokenprune_demo", f"{model} is a model of another package").SENTENCES.get(str(model))


def check_source(model: str | Path) -> None:
    """Raise TokenPruneError for a model that is neither a folder nor in the hub's cache nor on the hub.

    transformers would ask the hub for each file of it, again and again, before it says so.
    """
    name, path = str(model), Path(model)
    if path.is_dir():
        return
    if path.is_file():
        raise TokenPruneError(f"{name} is a file: name the folder with the model's config.json")
    if path.is_absolute() or name.startswith((".", "~")) or "\\" in name or name.count("/") > 1:
        raise TokenPruneError(f"there is no folder {name}: name one with a model's config.json")
    if (why := _missing(name)) is not None:
        close = get_close_matches(name, SHIPPED, 1)
        hint = f"did you mean {close[0]}?" if close else f"these ship: {', '.join(SHIPPED)}"
        raise TokenPruneError(f"there is no model {name!r}: no folder is called so, and {why} ({hint})")


def _missing(name: str) -> str | None:
    """Return why the hub does not give a model, None where it may."""
    from huggingface_hub import HfApi, constants, errors, try_to_load_from_cache

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return None
        if constants.HF_HUB_OFFLINE:
            return "the hub's cache lacks it, which is all there is while HF_HUB_OFFLINE is set"
        HfApi().model_info(name, timeout=_PATIENCE)
    except errors.HFValidationError:
        return "it is no name of a model on the hub either, such as Qwen/Qwen2.5-VL-3B-Instruct"
    except errors.GatedRepoError:
        return None  # its files may be cached, and transformers says what to do
    except errors.RepositoryNotFoundError:
        return "the hub has none, or shows it to its owner alone (hf auth login)"
    except errors.HfHubHTTPError:
        return None  # the hub is busy or broken: transformers asks again
    except Exception as error:  # the client's, of one library or the other
        reason = str(error).strip() or type(error).__name__
        return f"the hub cannot be reached ({reason}): download it where it can, and name the folder"
    return None


def read_model_config(model: str | Path) -> Any:
    """Return the config of a model on disk or in the hub's cache, or of one that ships; raises TokenPruneError where it
    cannot be read."""
    source = get_shipped_folder(model) or model
    check_source(source)
    with hide_torch():
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(str(source))
        except (OSError, ValueError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise TokenPruneError(f"cannot read the config of {model}: {reason}") from error
