# SPDX-License-Identifier: Apache-2.0
"""Uses of several models or passes: asking twice, drafting, and processors without a model."""
