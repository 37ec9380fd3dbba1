# SPDX-License-Identifier: Apache-2.0
"""Let OpenMP's threads sleep while they wait: for scripts to import ahead of torch, as their first import."""

from tokenprune.models.torch_import import set_passive_threads

set_passive_threads()
