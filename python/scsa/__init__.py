# SPDX-License-Identifier: Apache-2.0
"""Sparse decode attention for CPUs: a plugin for llama-cpp-python, and the operator for numpy arrays."""

from ._core import (
    AuditSample,
    AuditSummary,
    Config,
    Layer,
    Stats,
    __version__,
    active_target,
    default_tolerance,
    exact_attention,
    force_target,
    targets,
    tau_grid,
)
from .llama import audit, enable, plugin_path, set_option, stats

__all__ = [
    "AuditSample",
    "AuditSummary",
    "Config",
    "Layer",
    "Stats",
    "__version__",
    "active_target",
    "audit",
    "default_tolerance",
    "enable",
    "exact_attention",
    "force_target",
    "plugin_path",
    "set_option",
    "stats",
    "targets",
    "tau_grid",
]
