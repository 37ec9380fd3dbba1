# SPDX-License-Identifier: Apache-2.0
"""Facts about model types: the table of families, and sizes that follow from a config."""
