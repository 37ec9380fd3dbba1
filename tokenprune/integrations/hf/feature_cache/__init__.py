# SPDX-License-Identifier: Apache-2.0
"""An add-on: keep what images became in the vision tower, for further questions about them (`feature_cache=`)."""
