# SPDX-License-Identifier: Apache-2.0
"""Cache encoder outputs, so that further questions about an image skip the vision tower (`feature_cache=`)."""
