# SPDX-License-Identifier: Apache-2.0
"""Methods for videos, and the base classes they share."""
