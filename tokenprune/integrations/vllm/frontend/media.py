# SPDX-License-Identifier: Apache-2.0
"""Decode the images of a request at the scale that its setting needs, with vLLM's registry of media connectors.

vLLM decodes images before it calls the processor. The connector therefore reads the setting of the request when vLLM
starts to parse its messages. The setting only decides the scale: if the request is served under another setting, its
images are decoded again.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import vllm.envs as envs
from PIL import Image
from vllm.multimodal.image import normalize_image, open_image
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector, MediaWithBytes
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.processing import BaseProcessingInfo

from tokenprune.errors import TokenPruneError
from tokenprune.integrations.shared.decoding import draft, find_scale, get_full_size
from tokenprune.integrations.vllm import compat
from tokenprune.integrations.vllm.frontend.pixels import Shrinker, make_shrinker
from tokenprune.integrations.vllm.settings.configuration import get_server_setting
from tokenprune.integrations.vllm.settings.keys import KEY, NO_SETTING
from tokenprune.integrations.vllm.settings.server_config import get_server_config

logger = logging.getLogger(__name__)
_DEFAULT_CONNECTOR = "http"
_JPEG = b"\xff\xd8\xff"

# How the images of the request that is being parsed are shrunk. None: they are not.
_SHRINKER: ContextVar[Shrinker | None] = ContextVar("tokenprune_shrinker", default=None)
# Each served model's `ProcessingInfo`, by the id of its multimodal config.
_INFOS: dict[int, BaseProcessingInfo] = {}


@dataclass
class ScaledMedia(MediaWithBytes):
    """An image that was decoded at a smaller size.

    Args:
        shrinker: The setting for which it was decoded.
        full_size: (height, width) of the file.
        image_io: Decodes the file.
    """

    shrinker: Shrinker = field(kw_only=True, repr=False)
    full_size: tuple[int, int] = field(kw_only=True)
    image_io: ImageMediaIO = field(kw_only=True, repr=False)

    def decode_for(self, shrinker: Shrinker | None) -> MediaWithBytes:
        """Return the image as decoded for a request. shrinker: None if the request does not shrink images."""
        if shrinker is not None and shrinker.decodes_like(self.shrinker):
            return self
        return _load(self.image_io, self.original_bytes, shrinker)


class ScaledConnector(MediaConnector):
    """vLLM's connector, which decodes JPEG images of requests with a budget at a smaller size."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shrinker = _SHRINKER.get()

    def load_from_url(self, url: str, media_io: Any, **kwargs: Any) -> Any:
        return super().load_from_url(url, self._wrap(media_io), **kwargs)

    async def load_from_url_async(self, url: str, media_io: Any, **kwargs: Any) -> Any:
        return await super().load_from_url_async(url, self._wrap(media_io), **kwargs)

    def _wrap(self, media_io: Any) -> Any:
        if self._shrinker is None or type(media_io) is not ImageMediaIO:
            return media_io
        return _ScaledImageIO(media_io, self._shrinker)


class _ScaledImageIO(ImageMediaIO):
    """Loads images at the scale that a `Shrinker` needs."""

    def __init__(self, image_io: ImageMediaIO, shrinker: Shrinker) -> None:
        self.__dict__.update(vars(image_io))
        self._image_io, self._shrinker = image_io, shrinker

    def load_bytes(self, data: bytes) -> MediaWithBytes:
        return _load(self._image_io, data, self._shrinker)


def _load(image_io: ImageMediaIO, data: bytes, shrinker: Shrinker | None) -> MediaWithBytes:
    """Load an image as vLLM does, at a smaller scale if `shrinker` permits it. Raises ValueError for a damaged file."""
    scaled = None if shrinker is None else _open_scaled(data, shrinker)
    if scaled is None or shrinker is None:
        return image_io.load_bytes(data)
    image, full_size = scaled
    try:
        image = normalize_image(image)
        image.load()
        converted = image_io._convert_image_mode(image)
    except (OSError, Image.UnidentifiedImageError) as error:
        raise ValueError(f"Failed to load image: {error}") from error
    # As in vLLM's `load_bytes`: a conversion is part of the cache key. The scale follows from the request's setting,
    # which is part of the key anyway.
    names = ("image_mode", "rgba_background_color")
    io_config = None if converted is image else {name: getattr(image_io, name) for name in names}
    return ScaledMedia(converted, data, io_config, shrinker=shrinker, full_size=full_size, image_io=image_io)


def _open_scaled(data: bytes, shrinker: Shrinker) -> tuple[Image.Image, tuple[int, int]] | None:
    """Return a JPEG that will be decoded at a smaller scale, and its full size. None: vLLM loads the file."""
    if not data.startswith(_JPEG):
        return None
    try:
        image = open_image(BytesIO(data))
        full_size, limit = get_full_size(image), envs.VLLM_MAX_IMAGE_PIXELS
        if 0 < limit < image.width * image.height:
            return None  # vLLM refuses the file
        if (scale := find_scale(*full_size, shrinker.make_find_need())) == 1:
            return None
        draft(image, scale)
    except Exception:  # vLLM reads the file again, and reports what is wrong with it
        return None
    return image, full_size


# -- installation


def set_info(info: BaseProcessingInfo) -> None:
    """Remember the `ProcessingInfo` of a served model, which knows the model's processor."""
    _INFOS[id(info.ctx.model_config.multimodal_config)] = info


def install_connector() -> None:
    """Replace vLLM's default media connector, or log once why images are decoded completely."""
    if MEDIA_CONNECTOR_REGISTRY.name2class.get(_DEFAULT_CONNECTOR) is ScaledConnector:
        return
    if envs.VLLM_MEDIA_CONNECTOR != _DEFAULT_CONNECTOR:
        logger.warning(
            "tokenprune: images are decoded at full size, because VLLM_MEDIA_CONNECTOR selects another connector"
        )
        return
    parsers = find_parsers()
    if not parsers:
        logger.warning("tokenprune: images are decoded at full size, because this vLLM parses messages in another way")
        return
    MEDIA_CONNECTOR_REGISTRY.register(_DEFAULT_CONNECTOR)(ScaledConnector)
    for parser in parsers:
        compat.call_after(parser, "__init__", _read_request)


def find_parsers() -> list[Any]:
    """Return vLLM's parsers of messages, if they get the request's `mm_processor_kwargs` as in vLLM 0.32."""
    import vllm.renderers.chat_utils as chat_utils

    names = ("MultiModalContentParser", "AsyncMultiModalContentParser")
    parsers = [getattr(chat_utils, name, None) for name in names]
    return parsers if all(parser is not None and _reads_request(parser) for parser in parsers) else []


def _reads_request(parser: Any) -> bool:
    return {"tracker", "mm_processor_kwargs"} <= set(inspect.signature(parser.__init__).parameters)


def _read_request(result: None, parser: Any, tracker: Any, mm_processor_kwargs: Any = None, **_: Any) -> None:
    _SHRINKER.set(_find_shrinker(tracker.model_config, mm_processor_kwargs or {}))


def _find_shrinker(model_config: Any, mm_processor_kwargs: Mapping[str, Any]) -> Shrinker | None:
    """Return how a request's images are shrunk. None if they are not, or if its setting will be refused."""
    info = _INFOS.get(id(model_config.multimodal_config))
    if info is None or get_server_setting(model_config) is None:
        return None
    kwargs = dict(mm_processor_kwargs)
    requested = kwargs.pop(KEY, NO_SETTING)
    try:
        # The gateway has resolved the request already, see `gateway.choice.Choice`.
        setting = getattr(requested, "setting", None) or get_server_config(model_config).setting(requested)
    except (TokenPruneError, ValueError):
        return None
    return make_shrinker(setting, info, kwargs)
