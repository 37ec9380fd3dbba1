# SPDX-License-Identifier: Apache-2.0
"""Facts about model types: the table of families, and sizes computed from a config."""
