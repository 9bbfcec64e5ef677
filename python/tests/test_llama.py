# SPDX-License-Identifier: Apache-2.0
"""The plugin in llama-cpp-python. Tests that need it, or a model (SCSA_TEST_MODEL), are skipped without."""

import os
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

import scsa.llama

ROOT = pathlib.Path(__file__).parents[2]
MODEL = os.environ.get("SCSA_TEST_MODEL", "")


def run(code, **environment):
    """A program of its own: a plugin cannot be unloaded."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


needs_llama = pytest.mark.skipif(
    run("import llama_cpp").returncode != 0, reason="llama-cpp-python is not installed"
)
needs_model = pytest.mark.skipif(not MODEL, reason="SCSA_TEST_MODEL is not set")


def test_counters_are_those_of_the_header():
    header = (ROOT / "include/scsa/plugin.h").read_text()
    struct = re.search(r"struct scsa_plugin_stats {(.*?)^};", header, re.S | re.M).group(1)
    assert tuple(re.findall(r"^  uint64_t (\w+);", struct, re.M)) == scsa.llama._STATS_FIELDS


def test_without_llama_cpp_python():
    result = run("import sys; sys.modules['llama_cpp'] = None; import scsa; scsa.enable()")
    assert result.returncode != 0
    assert "ImportError: scsa.enable() needs llama-cpp-python" in result.stderr


@needs_llama
def test_another_version_of_ggml():
    result = run("import scsa.llama; scsa.llama.GGML_VERSION = '0.1.2'; scsa.enable()")
    assert result.returncode != 0
    assert re.search(r"RuntimeError: the plugin was built for ggml 0\.1\.2, but .* runs ggml \d", result.stderr)


@needs_llama
def test_a_bad_environment_variable():
    result = run("import scsa; scsa.enable()", SCSA_MODE="quick")
    assert result.returncode != 0
    assert 'scsa: SCSA_MODE: "quick" is not allowed' in result.stderr
    assert "RuntimeError: the plugin did not load" in result.stderr


@needs_llama
def test_options():
    result = run(
        """
        import scsa
        try: scsa.set_option("mode", "exact")
        except RuntimeError as error: print(error)
        scsa.enable(mode="exact", stats=False)
        scsa.enable(tolerance=0.05)
        for name, value in (("mode", "quick"), ("speed", 1)):
            try: scsa.set_option(name, value)
            except ValueError as error: print(error)
        print(scsa.stats()["attn_calls"], scsa.audit()["share"])
        """
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "the plugin is not loaded: call scsa.enable() first",
        'mode: "quick" is not allowed; use auto, exact, off or limit',
        'speed: unknown option "speed"; there are mode, preset, selection, tolerance, calibrate, crossover, taus, '
        "audit, prompt_tolerance, progress, stats, max_mem, checks and packed",
        "0 0.00390625",
    ]
    assert result.stderr.count("mode auto, preset fast, tolerance 0.015") == 1


@needs_llama
@needs_model
@pytest.mark.parametrize("import_first", [False, True])
def test_a_model_decodes_with_it(import_first):
    result = run(
        f"""
        {"import llama_cpp" if import_first else "pass"}
        import scsa
        scsa.enable(crossover=512, calibrate=4)
        from llama_cpp import Llama
        llama = Llama(model_path={MODEL!r}, n_ctx=768, n_threads=2, n_batch=512, flash_attn=True, verbose=False)
        llama.eval([i % 1000 for i in range(600)])
        prompt = scsa.stats()
        for token in range(12):
            llama.eval([token])
        stats = scsa.stats()
        layers = (stats["attn_calls"] - prompt["attn_calls"]) / 12
        print(layers > 0, prompt["prompt_rows"] / layers, stats["calibration_calls"], stats["sparse_calls"] / layers)
        print(0 < stats["rows_read"] < stats["rows_visible"], len(scsa.audit()["layers"]) <= layers)
        """
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["True 4.0 0 12.0", "True True"]
