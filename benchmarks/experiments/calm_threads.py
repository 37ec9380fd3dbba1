# SPDX-License-Identifier: Apache-2.0
"""Let waiting OpenMP threads sleep. Scripts import this module before torch."""

from tokenprune.models.torch_import import set_passive_threads

set_passive_threads()
