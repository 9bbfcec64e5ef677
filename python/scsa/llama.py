# SPDX-License-Identifier: Apache-2.0
"""The plugin in llama-cpp-python: loading it, its options, what it measured."""

from __future__ import annotations

import ctypes
import json
import pathlib
from typing import Any, Dict

from ._core import GGML_VERSION

_REGISTRY_NAME = b"SCSA"

# include/scsa/plugin.h
_STATS_FIELDS = (
    "attn_ns",
    "attn_calls",
    "set_rows_ns",
    "sparse_calls",
    "exact_calls",
    "calibration_calls",
    "limit_calls",
    "rows_read",
    "rows_visible",
    "bytes_read",
    "plan_build_ns",
    "plan_bytes",
    "rebuild_count",
    "dropped_blocks",
    "failures",
    "calibrated_layers",
    "audited_outputs",
    "recalibrated_heads",
    "audit_failures",
    "audit_ns",
    "prompt_rows",
    "prompt_ns",
    "prompt_tiles",
    "prompt_sparse_tiles",
    "prompt_measured_tiles",
    "prompt_rows_read",
    "prompt_rows_visible",
    "prompt_audited_tiles",
    "prompt_error_millionths",
    "max_mem",
    "evicted_blocks",
    "refused_blocks",
    "crossover_trials",
    "crossover",
)


class _PluginStats(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t)] + [(name, ctypes.c_uint64) for name in _STATS_FIELDS]


_SET = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p)
_GET_STATS = ctypes.CFUNCTYPE(None, ctypes.POINTER(_PluginStats))
_GET_TEXT = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t)


def plugin_path() -> pathlib.Path:
    """The plugin of this package, for GGML_BACKEND_PATH or LD_PRELOAD. FileNotFoundError where it was built without."""
    path = pathlib.Path(__file__).parent / "lib" / "libggml-scsa.so"
    if not path.exists():
        raise FileNotFoundError(
            "this installation of scsa has no plugin: it was built without SCSA_LLAMA_CPP_DIR (docs/python.md)"
        )
    return path


def _ggml() -> ctypes.CDLL:
    """The libllama that llama_cpp opened; ggml's functions are found through it, since it depends on them."""
    try:
        from llama_cpp import llama_cpp as binding
    except ImportError as error:
        raise ImportError("scsa.enable() needs llama-cpp-python: pip install llama-cpp-python") from error
    return binding._lib


def _function(lib: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    try:
        function = lib[name]  # an object of its own: llama_cpp's prototypes stay as they are
    except AttributeError:
        raise RuntimeError(
            f"this llama-cpp-python offers no {name}: ggml is linked in statically; build it with shared libraries"
        ) from None
    function.restype = result
    function.argtypes = arguments
    return function


def _registry(lib: ctypes.CDLL) -> Any:
    return _function(lib, "ggml_backend_reg_by_name", ctypes.c_void_p, ctypes.c_char_p)(_REGISTRY_NAME)


def _plugin_function(name: str, prototype: Any) -> Any:
    lib = _ggml()
    registry = _registry(lib)
    if registry is None:
        raise RuntimeError("the plugin is not loaded: call scsa.enable() first")
    find = _function(lib, "ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    return prototype(find(registry, name.encode()))


def enable(**options: object) -> None:
    """Loads the plugin into llama-cpp-python, before or after llama_cpp is imported but before a Llama is made.

    Only a model opened with ``Llama(..., flash_attn=True)`` uses it. ``options``: as in :func:`set_option`, for example
    ``enable(mode="exact")`` or ``enable(tolerance=0.05)``. Further calls change options alone.

    ImportError without llama-cpp-python; RuntimeError when its ggml is not the version that the plugin was built for, or
    the plugin refuses an environment variable (the reason is on stderr); ValueError for a bad option.
    """
    lib = _ggml()
    if _registry(lib) is None:
        running = (_function(lib, "ggml_version", ctypes.c_char_p)() or b"unknown").decode()
        path = plugin_path()
        if running != GGML_VERSION:
            raise RuntimeError(
                f"the plugin was built for ggml {GGML_VERSION}, but this llama-cpp-python runs ggml {running}: "
                "build scsa with the llama.cpp of this llama-cpp-python (docs/python.md)"
            )
        load = _function(lib, "ggml_backend_load", ctypes.c_void_p, ctypes.c_char_p)
        if load(str(path).encode()) is None:
            raise RuntimeError("the plugin did not load; the line that starts with \"scsa:\" on stderr says why")
    for name, value in options.items():
        set_option(name, value)


def set_option(name: str, value: object) -> None:
    """Changes an option (docs/reference.md): mode, preset, selection, tolerance, calibrate, crossover, taus, audit, stats, max_mem,
    checks, packed.

    Options of the operator hold for models opened afterwards. ValueError says what is wrong with a value.
    """
    text = str(int(value)) if isinstance(value, bool) else str(value)
    refusal = _plugin_function("scsa_plugin_set", _SET)(name.encode(), text.encode())
    if refusal is not None:
        raise ValueError(f"{name}: {refusal.decode()}")


def stats() -> Dict[str, int]:
    """The plugin's counters since it was loaded; include/scsa/plugin.h says what they count."""
    figures = _PluginStats(struct_size=ctypes.sizeof(_PluginStats))
    _plugin_function("scsa_plugin_get_stats", _GET_STATS)(ctypes.byref(figures))
    return {name: getattr(figures, name) for name in _STATS_FIELDS}


def audit() -> Dict[str, Any]:
    """The error measured while it runs: {"share": ..., "all": {...}, "layers": {"0": {...}}} (docs/plugin.md)."""
    get = _plugin_function("scsa_plugin_get_audit_json", _GET_TEXT)
    size = get(None, 0)
    while True:
        text = ctypes.create_string_buffer(size + 1)
        length = get(text, size + 1)
        if length <= size:
            break
        size = length
    if length == 0:
        raise MemoryError("the plugin could not write what the audit measured")
    result: Dict[str, Any] = json.loads(text.value)
    return result
