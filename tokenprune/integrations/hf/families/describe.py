# SPDX-License-Identifier: Apache-2.0
"""Describe a model type without a row in the family table, from its config and class. No weights are read."""

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
# Fields of a row that neither the config nor the class determines.
_UNKNOWN = {
    "patches": "how patches of its tower become visual tokens",
    "square": "if an image is one square of tokens without newlines",
    "resizing": "if its processor makes fewer tokens of a smaller image",
    "features_per_image": "if a list of the encoder's features has one entry per image",
}


@dataclass(frozen=True)
class Description:
    """Properties of a model type, read from its config and class.

    Attributes:
        row: Row for the family table.
        properties: Decoder, tower, placeholders and image arguments, as text.
        missing: Fields of the row that the user must fill in, with a hint.
        load: Call of AutoConfig that loads the config.
    """

    row: Family
    properties: dict[str, str]
    missing: dict[str, str]
    load: str

    def files(self) -> dict[str, str]:
        """Return the text of a module that registers the row, and of its test, keyed by file name."""
        defaults, module = vars(Family(self.row.name)), re.sub(r"\W", "_", self.row.name)
        fields = [f"{field}={value!r}" for field, value in vars(self.row).items() if value != defaults[field]]
        values = {
            "name": self.row.name,
            "module": module,
            "cls": "".join(part.capitalize() for part in module.split("_")),
            "row": f"Family({', '.join([repr(self.row.name), *fields])})".replace("'", '"'),
            "missing": "\n".join(f"#     {field}: {hint}" for field, hint in self.missing.items()),
            "load": self.load,
            "decoder": self.properties["decoder"].split()[0],
            "placeholders": self.properties["placeholders"],
        }
        names = {f"family_{module}.py": "family.py", f"test_family_{module}.py": "test.py"}
        texts = {name: (_TEMPLATES / f"{file}.template").read_text(encoding="utf-8") for name, file in names.items()}
        return {name: Template(text).substitute(values) for name, text in texts.items()}


def describe(model: str | Path) -> Description:
    """Describe a model type from its config and class.

    Args:
        model: Model type of transformers, or folder of a checkpoint with config.json.

    Raises:
        OptionError: If the type has a row, or transformers cannot build it without weights.
        UnsupportedModelError: If the type cannot be supported.
    """
    config, built, load = _build_model(model)
    base, decoder, path = _find_decoder(config, built)
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
    properties = {
        "decoder": f"{type(decoder).__name__} at {path} of {type(base).__name__}, its last norm is {norm}",
        "tower": f"{get_tower_type(config)} at {tower}" if tower else "not found",
        "placeholders": str(ids),
        "images": ", ".join(_list_parameters(base, "get_image_features")) or "no get_image_features",
    }
    missing = dict(_UNKNOWN)
    if "video" in ids:
        missing["videos"] = '"frames" if the tokens of each video frame are known'
    if extra := [name for name in _list_parameters(decoder, "forward") if name not in _KNOWN]:
        missing["entry_tokens"] = f"if {', '.join(extra)} of its decoder has an entry for each token"
    return Description(row, properties, missing, load)


def _list_parameters(module: nn.Module, name: str) -> list[str]:
    function = getattr(module, name, None)
    return (
        [parameter for parameter in inspect.signature(function).parameters if parameter != "kwargs"] if function else []
    )


def _build_model(model: str | Path) -> tuple[Any, Any, str]:
    """Return the config, the model without weights, and the call of AutoConfig that loads the config."""
    is_folder = Path(model, "config.json").is_file()
    loader, source = ("from_pretrained", str(Path(model).resolve())) if is_folder else ("for_model", str(model))
    try:
        config: Any = getattr(AutoConfig, loader)(source)
    except ValueError as error:
        raise OptionError(
            f"{str(model)!r} is neither a model type of transformers nor a folder with config.json."
        ) from error
    if (kind := config.model_type) in FAMILIES:
        raise OptionError(f"{kind!r} is already in the family table. See `tokenprune families`.")
    if kind in REFUSED:
        raise UnsupportedModelError(f"Model type {kind!r} is not supported: {REFUSED[kind]}.")
    try:
        with torch.device("meta"):
            return config, AutoModelForImageTextToText.from_config(config), f"{loader}({source!r})"
    except Exception as error:  # model classes raise various errors
        raise OptionError(
            f"transformers cannot build {kind!r} with images from {'this' if is_folder else 'its default'} config "
            f"({str(error).partition(chr(10))[0]}). Pass the folder of a checkpoint."
        ) from error


def _find_decoder(config: Any, model: Any) -> tuple[Any, Any, str]:
    """Return the module that encodes images, the decoder inside it, and the attribute path of the decoder."""
    for full_path, decoder in model.named_modules():
        config_class = isinstance(getattr(decoder, "layers", None), nn.ModuleList) and type(decoder.config)
        has_norm = any("norm" in name for name, _ in decoder.named_children())
        if not (full_path and has_norm and config_class is type(config.get_text_config())):
            continue
        names = full_path.split(".")
        outer = [(model.get_submodule(".".join(names[:end])), ".".join(names[end:])) for end in range(len(names))]
        base, path = ([pair for pair in outer if hasattr(pair[0], "get_image_features")] or outer[:1])[-1]
        return base, decoder, path
    raise OptionError(f"{type(model).__name__} has no decoder with layers and a norm. Write an adapter by hand.")
