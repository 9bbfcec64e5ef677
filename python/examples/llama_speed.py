# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of llama-cpp-python with and without the plugin, the same tokens from the same cache, in turn.

    python llama_speed.py model.gguf text.txt [tokens of context, default 4000]
"""

import pathlib
import statistics
import sys
import time

from llama_cpp import Llama

import scsa

STEPS = 24
ROUNDS = 7
THREADS = 2


def open_model(path, context):
    return Llama(model_path=path, n_ctx=context + 2 * STEPS, n_threads=THREADS, flash_attn=True, verbose=False)


def tokens_per_second(llama, tokens, start):
    llama.n_tokens = start  # the next eval removes what the last round appended
    llama.eval(tokens[start : start + 1])
    began = time.perf_counter()
    for token in tokens[start + 1 : start + STEPS]:
        llama.eval([token])
    return (STEPS - 1) / (time.perf_counter() - began)


def main():
    path, text = sys.argv[1], pathlib.Path(sys.argv[2]).read_bytes()
    context = int(sys.argv[3]) if len(sys.argv) > 3 else 4000

    plain = open_model(path, context)  # before enable(): this context never sees the plugin
    scsa.enable()
    served = open_model(path, context)

    tokens = plain.tokenize(text[: 8 * (context + STEPS)])
    plain.eval(tokens[:context])
    served.load_state(plain.save_state())

    speeds = {"llama-cpp-python": [], "with scsa.enable()": []}
    for _ in range(ROUNDS):
        for llama, rows in zip((plain, served), speeds.values()):
            rows.append(tokens_per_second(llama, tokens, context))
    base = statistics.median(speeds["llama-cpp-python"])
    for name, rows in speeds.items():
        median = statistics.median(rows)
        print(f"{name:18s} {median:6.1f} tok/s ({min(rows):.1f} to {max(rows):.1f}), {median / base:.2f} x")


if __name__ == "__main__":
    main()
