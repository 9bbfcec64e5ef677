#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What scsa.enable() gains in llama-cpp-python: tokens per second of decoding, with and without.

Each kind of attention decodes the same tokens, the text's own, after the same saved cache, in processes of their own that
take turns. So the figures compare attention alone, and the most likely token of each step can be compared, too.
scripts/bench-python runs this program; docs/python.md shows what it printed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

# In the order of their turns. The first one knows nothing of the plugin.
ARMS = {"llama.cpp": None, "exact": {"mode": "exact"}, "scsa": {"mode": "auto"}}
# Not timed: graphs are built, and the default calibration window (32 steps) ends.
WARM_UP = 40


def open_model(args, tokens_needed):
    import llama_cpp

    return llama_cpp.Llama(
        args.model,
        n_ctx=tokens_needed,
        n_threads=args.threads,
        n_threads_batch=args.threads,
        flash_attn=True,
        verbose=False,
    )


def text_tokens(llama, path, n):
    text = pathlib.Path(path).read_bytes()[: 8 * n]
    tokens = llama.tokenize(text)
    if len(tokens) < n:
        sys.exit(f"{path} is too short: {len(tokens)} of {n} tokens")
    return tokens[:n]


def prefill(args):
    """Reads the document once, without the plugin, and saves its cache."""
    import llama_cpp

    n = args.tokens + WARM_UP + args.steps
    llama = open_model(args, n)
    tokens = text_tokens(llama, args.text, n)[: args.tokens]
    llama.eval(tokens)
    array = (llama_cpp.llama_token * len(tokens))(*tokens)
    partial = args.state + ".partial"
    if llama_cpp.llama_state_seq_save_file(llama.ctx, partial.encode(), 0, array, len(tokens)) == 0:
        sys.exit(f"cannot write {partial}")
    os.replace(partial, args.state)


def decode(args, options, logits_file):
    """One arm, once: prints its speed and the plugin's counters of the timed steps; the logits go into a file."""
    if options is not None:
        import scsa

        scsa.enable(**options)
    import llama_cpp

    n = args.tokens + WARM_UP + args.steps
    llama = open_model(args, n)
    tokens = text_tokens(llama, args.text, n)
    array = (llama_cpp.llama_token * n)()
    count = ctypes.c_size_t()
    if llama_cpp.llama_state_seq_load_file(llama.ctx, args.state.encode(), 0, array, n, ctypes.byref(count)) == 0:
        sys.exit(f"cannot read {args.state}; delete it")
    if list(array[: count.value]) != tokens[: args.tokens]:
        sys.exit(f"{args.state} belongs to another text or length; delete it")
    llama.input_ids[: args.tokens] = array[: args.tokens]
    llama.n_tokens = args.tokens

    def step(i):
        llama.eval([tokens[args.tokens + i]])
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llama.ctx, -1), (llama.n_vocab(),)).copy()

    for i in range(WARM_UP):
        step(i)
    before = scsa.stats() if options is not None else {}
    begin = time.perf_counter()
    logits = [step(WARM_UP + i) for i in range(args.steps)]
    seconds = time.perf_counter() - begin
    after = scsa.stats() if options is not None else {}
    np.save(logits_file, np.array(logits))
    layers = llama_cpp.llama_model_n_layer(llama.model)
    counters = {name: after[name] - before[name] for name in after}
    print(json.dumps({"tok_s": args.steps / seconds, "layers": layers, "counters": counters}))


def run(args, arm):
    """decode() in a process of its own, for a plugin cannot be unloaded."""
    with tempfile.TemporaryDirectory() as folder:
        logits_file = pathlib.Path(folder) / "logits.npy"
        command = [sys.executable, __file__, *sys.argv[1:], "--decode", arm, "--logits", str(logits_file)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            sys.exit(f"{arm} failed:\n{result.stderr}")
        return json.loads(result.stdout.splitlines()[-1]), np.load(logits_file)


def check_counters(arm, figures, steps):
    """An arm that did not run as it is called would be measured for nothing."""
    counters, calls = figures["counters"], figures["layers"] * steps
    counter = {"exact": "exact_calls", "scsa": "sparse_calls"}.get(arm)
    if counter is None:
        return
    if counters["failures"] > 0 or counters[counter] < 0.9 * calls:
        sys.exit(f"{arm}: only {counters[counter]} of {calls} attention calls, {counters['failures']} failures")


def compare(reference, logits):
    """Most likely tokens beside those of the exact kernel; where they differ, how close the two tokens were there."""
    best, other = reference.argmax(axis=1), logits.argmax(axis=1)
    at = np.flatnonzero(best != other)
    gaps = [float(reference[i, best[i]] - reference[i, other[i]]) for i in at]
    return {
        "steps": len(best),
        "same": len(best) - len(at),
        "widest_gap": max(gaps, default=0.0),
        "widest_logit_difference": float(np.abs(reference - logits).max()),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--text", required=True, help="a long text; its beginning is the document")
    parser.add_argument("--state", required=True, help="file of the document's cache; made by the first run")
    parser.add_argument("--tokens", type=int, default=4000, help="length of the document (default: 4000)")
    parser.add_argument("--steps", type=int, default=64, help=f"timed steps, after {WARM_UP} others (default: 64)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each kind of attention (default: 3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="(default: all)")
    parser.add_argument("--json", help="the figures as JSON, into this file")
    parser.add_argument("--decode", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--logits", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.decode:
        decode(args, ARMS[args.decode], args.logits)
        return

    if not pathlib.Path(args.state).exists():
        print(f"Reading {args.tokens} tokens, once", file=sys.stderr)
        prefill(args)
    speeds = {arm: [] for arm in ARMS}
    logits = {}
    shares = {}
    names = list(ARMS)
    for turn in range(args.rounds):
        for arm in names[turn % len(names) :] + names[: turn % len(names)]:
            figures, logits[arm] = run(args, arm)
            check_counters(arm, figures, args.steps)
            speeds[arm].append(figures["tok_s"])
            counters = figures["counters"]
            if counters:
                shares[arm] = counters["rows_read"] / counters["rows_visible"]
    median = {arm: statistics.median(values) for arm, values in speeds.items()}
    comparison = {arm: compare(logits["exact"], logits[arm]) for arm in ARMS}

    print("| attention | tok/s, median (least to most) | speed-up | rows read | same most likely token |")
    print("|---|---|---|---|---|")
    for arm in ARMS:
        same = comparison[arm]
        print(
            f"| {arm} | {median[arm]:.1f} ({min(speeds[arm]):.1f} to {max(speeds[arm]):.1f}) "
            f"| {median[arm] / median['llama.cpp']:.2f} x | {100 * shares.get(arm, 1.0):.1f} % "
            f"| {same['same']} of {same['steps']} |"
        )
    plain = comparison["llama.cpp"]
    print(
        f"\nllama.cpp and the exact kernel: logits at most {plain['widest_logit_difference']:.2g} apart; where the most "
        f"likely token differs, the two were at most {plain['widest_gap']:.2g} apart."
    )
    if args.json:
        result = {
            "model": pathlib.Path(args.model).name,
            "tokens": args.tokens,
            "steps": args.steps,
            "threads": args.threads,
            "tok_s": speeds,
            "rows_read": shares,
            "beside_exact": comparison,
        }
        pathlib.Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
