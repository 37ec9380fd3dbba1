# SPDX-License-Identifier: Apache-2.0
"""Let OpenMP's threads sleep while they wait: for scripts to import ahead of torch, as their first import."""

from tokenprune.models import torch_import as startup

startup.calm_threads()
