# SPDX-License-Identifier: Apache-2.0
"""Development set-up only: let a CUDA build of torchvision be imported beside a CPU build of torch.

torchvision registers fake kernels for two operators (``nms``, ``qnms``) that its compiled library declares; that
library does not load beside a CPU build of torch, so the registration fails. ``make`` copies this file and a ``.pth``
line into the development virtual environment; it declares the two operators the first time torchvision is imported, in
every process.
"""

import sys
from importlib.machinery import PathFinder


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torchvision":
            return None
        sys.meta_path.remove(_Finder)
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            return None
        import torch

        if torch.version.cuda is None:
            library = torch.library.Library("torchvision", "DEF")
            for op in ("nms", "qnms"):
                library.define(op + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.modules[__name__]._keep = library
        return spec


sys.meta_path.insert(0, _Finder)
