#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ggml_versions_test.py MODEL VERSION PACKAGE LIBRARIES PLUGIN [VERSION PACKAGE LIBRARIES PLUGIN ...]

For each version of llama-cpp-python: its own Python code (the folder PACKAGE, on the libraries in LIBRARIES) decodes a
text without the plugin, with the plugin built for it, and with the one of the next version, which must stay out. Needs
numpy and what llama-cpp-python imports. scripts/test-ggml-versions builds all that and runs this program.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import numpy as np

STEPS = 16
# Its pattern leaves no doubt about the next words, so that rounding and approximation do not show in them.
PROMPT = "\n".join(
    f"Entry {i}: the lighthouse keeper wrote down the weather, the ships and the colour of the sea." for i in range(1, 36)
)
# Mean KL divergence from llama.cpp's own attention, in nats. The exact kernel differs by ggml's rounding, sums in f16.
EXACT_KL = 0.01
SPARSE_KL = 0.05


def decode(model, logits_file):
    """Runs in a process of its own: greedy decoding, its logits into a file, what it was into one line of JSON."""
    import llama_cpp

    # Greater than a batch, so that the plugin sees a part of the prompt, too.
    # verbose, for otherwise stderr leads nowhere while backends register, and with it what the plugin says.
    llama = llama_cpp.Llama(model, n_ctx=1024, n_batch=512, n_threads=2, flash_attn=True, verbose=True)
    prompt = llama.tokenize(PROMPT.encode())
    llama.eval(prompt)
    tokens, steps = [], []
    for _ in range(STEPS):
        logits = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
        steps.append(np.ctypeslib.as_array(logits, (llama.n_vocab(),)).copy())
        tokens.append(int(np.argmax(steps[-1])))
        llama.eval(tokens[-1:])
    np.save(logits_file, np.array(steps))
    version = llama_cpp.llama_cpp._lib["ggml_version"]
    version.restype = llama_cpp.llama_cpp.ctypes.c_char_p
    facts = {
        "ggml": version().decode(),
        "prompt": len(prompt),
        "layers": llama_cpp.llama_model_n_layer(llama.model),
        "text": llama.detokenize(tokens).decode(),
    }
    print(json.dumps(facts))


def run(model, package, libraries, **settings):
    """decode() with the environment of `settings`: its facts, its logits, and the lines of the plugin."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SCSA_", "GGML_", "LD_PRELOAD"))}
    with tempfile.TemporaryDirectory() as folder:
        logits_file = pathlib.Path(folder) / "logits.npy"
        result = subprocess.run(
            [sys.executable, __file__, "--decode", model, str(logits_file)],
            env={
                **clean,
                "PYTHONPATH": package,
                "LLAMA_CPP_LIB_PATH": libraries,
                "OMP_WAIT_POLICY": "passive",
                **settings,
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if result.returncode != 0:
            sys.exit(f"decoding with {package} failed:\n{result.stdout}\n{result.stderr}")
        lines = [line for line in result.stderr.splitlines() if line.startswith("scsa")]
        return json.loads(result.stdout.splitlines()[-1]), np.load(logits_file), lines


def counters(lines):
    """The counters of the summary that SCSA_STATS=1 prints."""
    text = "\n".join(lines)
    names = ("attention calls", "sparse", "exact", "calibration")
    found = {name: re.search(rf"{name} (\d+)", text) for name in names}
    found["failures"] = re.search(r"(\d+) failures", text)
    assert all(found.values()), f"no summary of the plugin:\n{text}"
    return {name: int(match[1]) for name, match in found.items()}


def mean_kl(reference, logits):
    def log_softmax(x):
        x = x.astype(np.float64)
        x -= x.max(axis=1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=1, keepdims=True))

    p, q = log_softmax(reference), log_softmax(logits)
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


def check(model, version, package, libraries, plugin, foreign):
    plain, plain_logits, lines = run(model, package, libraries)
    assert lines == [], lines
    assert plain["prompt"] > 600 and "lighthouse" in plain["text"], plain
    calls = plain["layers"] * STEPS

    exact, logits, lines = run(model, package, libraries, LD_PRELOAD=plugin, SCSA_MODE="exact", SCSA_STATS="1")
    counts = counters(lines)
    assert counts["exact"] >= calls and counts["sparse"] == counts["failures"] == 0, lines
    assert exact["text"] == plain["text"], (exact["text"], plain["text"])
    exact_kl = mean_kl(plain_logits, logits)
    # Not ggml's bits: another kernel has answered.
    assert 0 < exact_kl < EXACT_KL, exact_kl

    # The prompt calibrates, so that each decoded token is sparse.
    sparse, logits, lines = run(
        model, package, libraries, LD_PRELOAD=plugin, SCSA_CROSSOVER="512", SCSA_CALIBRATE="8", SCSA_STATS="1"
    )
    counts = counters(lines)
    assert counts["sparse"] == calls and counts["failures"] == 0, lines
    assert sparse["text"] == plain["text"], (sparse["text"], plain["text"])
    sparse_kl = mean_kl(plain_logits, logits)
    assert exact_kl != sparse_kl and 0 < sparse_kl < SPARSE_KL, sparse_kl

    refused, logits, lines = run(model, package, libraries, LD_PRELOAD=foreign, SCSA_STATS="1")
    expected = rf"scsa: built for ggml [\d.]+, but this program runs ggml {re.escape(plain['ggml'])}; use the plugin .*"
    assert len(lines) == 1 and re.fullmatch(expected, lines[0]), lines
    assert refused["text"] == plain["text"] and np.array_equal(logits, plain_logits), "a refused plugin changed logits"

    return f"| {plain['ggml']} | {version} | {exact_kl:.1e} | {sparse_kl:.1e} |"


def main():
    if sys.argv[1] == "--decode":
        decode(*sys.argv[2:])
        return
    model, rest = sys.argv[1], sys.argv[2:]
    versions = [rest[i : i + 4] for i in range(0, len(rest), 4)]
    assert len(versions) > 1, "at least two versions, for one to refuse the other's plugin"
    rows = [check(model, *each, versions[i - 1][3]) for i, each in enumerate(versions)]
    print("| ggml | in llama-cpp-python | KL of exact | KL of sparse |", "|---|---|---|---|", *rows, sep="\n")


if __name__ == "__main__":
    main()
