# SPDX-License-Identifier: Apache-2.0
"""Describe a model type that the table of families lacks, by its config and its class: no weights are read."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from tokenprune.errors import OptionError, UnsupportedModelError
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.families.base import STATEFUL, get_placeholder_ids
from tokenprune.models.families import FAMILIES, REFUSED, Family, get_tower_type

_TEMPLATES = Path(__file__).parents[3] / "cli/templates/new_family"
_KNOWN = {"input_ids", "attention_mask", "position_ids", "inputs_embeds", "use_cache", "kwargs", *compat.CACHE_NAMES}
_UNTOLD = {
    "patches": "how patches of its tower become visual tokens",
    "square": "if an image is one square of tokens without newlines",
    "resizing": "if its processor makes fewer tokens of a smaller image",
    "features_per_image": "if a list of the encoder's features has one entry per image",
}


@dataclass(frozen=True)
class Description:
    """A model type as its config and its class tell.

    row: for the table of families. found: of the class, in words. missing: fields of the row that somebody has to say,
    and what that is. load: the call of AutoConfig that made the config.
    """

    row: Family
    found: dict[str, str]
    missing: dict[str, str]
    load: str

    def files(self) -> dict[str, str]:
        """Return the text of a module that registers the row, and of its test, by their names."""
        plain, module = vars(Family(self.row.name)), re.sub(r"\W", "_", self.row.name)
        own = [f"{field}={value!r}" for field, value in vars(self.row).items() if value != plain[field]]
        values = {
            "name": self.row.name,
            "module": module,
            "cls": "".join(part.capitalize() for part in module.split("_")),
            "row": f"Family({', '.join([repr(self.row.name), *own])})".replace("'", '"'),
            "missing": "\n".join(f"#     {field}: {what}" for field, what in self.missing.items()),
            "load": self.load,
            "decoder": self.found["decoder"].split()[0],
            "placeholders": self.found["placeholders"],
        }
        names = {f"family_{module}.py": "family.py", f"test_family_{module}.py": "test.py"}
        texts = {name: (_TEMPLATES / f"{one}.template").read_text(encoding="utf-8") for name, one in names.items()}
        return {name: Template(text).substitute(values) for name, text in texts.items()}


def describe(model: str | Path) -> Description:
    """Return what the config and the class of a model tell of its family.

    model: a model type of transformers, or the folder of a checkpoint, of which config.json is read.
    Raises OptionError for a type that has a row, or that transformers cannot build without weights, and
    UnsupportedModelError for one that is refused.
    """
    config, whole, load = _built(model)
    base, decoder, path = _decoder(config, whole)
    norm = next(name for name, _ in decoder.named_children() if "norm" in name)
    ids, kinds = get_placeholder_ids(config), set(getattr(decoder.config, "layer_types", None) or ())
    tower = next((name for name in ("vision_tower", "visual", "vision_model") if hasattr(base, name)), "")
    packed = all(hasattr(getattr(base, tower, None), name) for name in ("blocks", "merger", "spatial_merge_size"))
    row = Family(
        config.model_type,
        since=f"{compat.VERSION.major}.{compat.VERSION.minor}",
        videos="whole" if "video" in ids else "none",
        tower_rows="all images" if packed else None,
        stateful=bool(kinds & STATEFUL),
        static_cache=kinds <= {"full_attention", "sliding_attention"},
        decoder_names=(path,),
        norm_name=norm,
    )
    found = {
        "decoder": f"{type(decoder).__name__} at {path} of {type(base).__name__}, its last norm is {norm}",
        "tower": f"{get_tower_type(config)} at {tower}" if tower else "not found",
        "placeholders": str(ids),
        "images": ", ".join(_parameters(base, "get_image_features")) or "no get_image_features",
    }
    missing = dict(_UNTOLD)
    if "video" in ids:
        missing["videos"] = '"frames" if it is known which tokens of a video are a frame'
    if extra := [name for name in _parameters(decoder, "forward") if name not in _KNOWN]:
        missing["entry_tokens"] = f"if {', '.join(extra)} of its decoder has an entry for each token"
    return Description(row, found, missing, load)


def _parameters(module: nn.Module, name: str) -> list[str]:
    function = getattr(module, name, None)
    return [one for one in inspect.signature(function).parameters if one != "kwargs"] if function else []


def _built(model: str | Path) -> tuple[Any, Any, str]:
    """Return a config, a model of it without weights, and the call of AutoConfig that made the config."""
    folder = Path(model, "config.json").is_file()
    make, given = ("from_pretrained", str(Path(model).resolve())) if folder else ("for_model", str(model))
    try:
        config: Any = getattr(AutoConfig, make)(given)
    except ValueError as error:
        raise OptionError(f"{str(model)!r} is no model type of transformers, nor a folder with config.json") from error
    if (kind := config.model_type) in FAMILIES:
        raise OptionError(f"{kind!r} has a row in the table of families: `tokenprune families` shows it")
    if kind in REFUSED:
        raise UnsupportedModelError(f"model type {kind!r} is not supported: {REFUSED[kind]}")
    try:
        with torch.device("meta"):
            return config, AutoModelForImageTextToText.from_config(config), f"{make}({given!r})"
    except Exception as error:  # of the class: anything
        raise OptionError(
            f"transformers builds no {kind!r} that takes images from {'this' if folder else 'its default'} config "
            f"({str(error).partition(chr(10))[0]}): give the folder of a checkpoint"
        ) from error


def _decoder(config: Any, whole: Any) -> tuple[Any, Any, str]:
    """Return the module that encodes images, the decoder inside it, and the path from the one to the other."""
    for at, decoder in whole.named_modules():
        stack = isinstance(getattr(decoder, "layers", None), nn.ModuleList) and type(decoder.config)
        normed = any("norm" in name for name, _ in decoder.named_children())
        if not (at and normed and stack is type(config.get_text_config())):
            continue
        names = at.split(".")
        outer = [(whole.get_submodule(".".join(names[:end])), ".".join(names[end:])) for end in range(len(names))]
        base, path = ([one for one in outer if hasattr(one[0], "get_image_features")] or outer[:1])[-1]
        return base, decoder, path
    raise OptionError(f"{type(whole).__name__} has no decoder with layers and a norm: write an adapter by hand")
