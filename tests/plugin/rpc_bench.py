# SPDX-License-Identifier: Apache-2.0
"""Decoding at the end of a long text with a model's layers on ggml-rpc-servers, with the plugin and without.

scripts/bench-rpc runs it. All arms continue the same saved cache. It is written by the first run.
"""
import argparse
import contextlib
import http.client
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time

import rpc_servers
from server_test import Failure, Server, Test

ARMS = {"llama.cpp": None, "exact kernel": {"SCSA_MODE": "exact"}, "SCSA": {"SCSA_MODE": "auto"}}
# Steps before the measured ones: the sparse operator calibrates itself on the first 32.
WARM_UP = 40
SAVED = "cache.bin"


class Cluster:
    """A llama-server whose layers lie on n servers; in its own process where n is 0."""

    def __init__(self, options, test, name, n, env):
        plugin = None if env is None else options.plugin
        self.rpc = [rpc_servers.RpcServer(os.path.join(options.bin, "ggml-rpc-server"), plugin, env or {},
                                          options.threads, os.path.join(test.work, f"{name}-rpc-{i}.log"))
                    for i in range(n)]
        arguments = ["-c", str(options.tokens + WARM_UP + options.steps + 64), "-np", "1", "-t", str(options.threads),
                     "-fa", "on"]
        if n > 0:
            arguments += ["-ngl", "99", "--rpc", ",".join(s.endpoint for s in self.rpc), "-ts", ",".join(["1"] * n)]
        else:
            # The servers have no repacked weights either.
            arguments += ["--no-repack"]
        self.server = Server(test, name, arguments, env if n == 0 else None)

    def tokenize(self, text):
        return json.loads(self.server.request("POST", "/tokenize", {"content": text})[1])["tokens"]

    def bytes(self):
        counted = [s.bytes() for s in self.rpc]
        return None if not counted or None in counted else sum(map(sum, counted))

    def steps(self, prompt, n):
        """Of each generated token: the token, when it came, and the bytes that had crossed the network."""
        body = dict(prompt=prompt, n_predict=n, id_slot=0, stream=True, return_tokens=True, temperature=0,
                    ignore_eos=True, cache_prompt=True)
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=3600)
        steps = []
        with contextlib.closing(connection):
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    answer = json.loads(line[len(b"data: "):])
                    steps += [(t, time.monotonic(), self.bytes()) for t in answer.get("tokens", [])]
        return steps

    def close(self):
        with contextlib.suppress(Failure):
            self.server.stop()
        self.server.kill()
        for server in self.rpc:
            server.kill()


def measure(options, test, name, n, env, prompt):
    cluster = Cluster(options, test, name, n, env)
    try:
        shutil.copy(options.state, os.path.join(cluster.server.saved, SAVED))
        cluster.server.slot(0, "restore", SAVED)
        steps = cluster.steps(prompt, WARM_UP + options.steps + 1)
    finally:
        cluster.close()
    if len(steps) != WARM_UP + options.steps + 1:
        raise Failure(f"{name}: {len(steps)} tokens")
    steps = steps[WARM_UP:]
    times = [b[1] - a[1] for a, b in zip(steps, steps[1:])]
    sent = None if steps[0][2] is None else [b[2] - a[2] for a, b in zip(steps, steps[1:])]
    return dict(servers=n, tokens_per_second=len(times) / sum(times), median_ms=1000 * statistics.median(times),
                bytes_median=None if sent is None else statistics.median(sent),
                bytes_largest=None if sent is None else max(sent))


def processor():
    with open("/proc/cpuinfo", encoding="ascii") as info:
        names = [line.split(":")[1].strip() for line in info if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main():
    rpc_servers.isolate()
    parser = argparse.ArgumentParser(prog="bench-rpc", description=__doc__)
    for name in ("plugin", "bin", "model", "text", "state"):
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--servers", default="2", help="numbers of servers, separated by commas; 0: one process")
    parser.add_argument("--tokens", type=int, default=8000, help="length of the text")
    parser.add_argument("--steps", type=int, default=64, help="measured steps, after %d others" % WARM_UP)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of each server")
    parser.add_argument("--json", help="a file for the figures")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as work:
        test = Test(options.plugin, options.bin, work, options.model)
        reader = Cluster(options, test, "reader", 0, {"SCSA_MODE": "exact"})
        try:
            with open(options.text, encoding="utf-8", errors="replace") as file:
                prompt = reader.tokenize(file.read(options.tokens * 8))[:options.tokens]
            if len(prompt) < options.tokens:
                raise Failure(f"{options.text} has only {len(prompt)} tokens")
            if not os.path.exists(options.state):
                print(f"Reading {options.tokens} tokens, once", flush=True)
                reader.steps(prompt, 1)
                reader.server.slot(0, "save", SAVED)
                shutil.copy(os.path.join(reader.server.saved, SAVED), options.state + ".new")
                os.replace(options.state + ".new", options.state)
        finally:
            reader.close()
        print("| servers | attention | tok/s | median ms | speed-up | bytes per token | largest |")
        print("|---|---|---|---|---|---|---|")
        for n in map(int, options.servers.split(",")):
            for arm, env in ARMS.items():
                row = measure(options, test, f"{arm.replace(' ', '-')}-{n}", n, env, prompt)
                row["attention"] = arm
                rows.append(row)
                base = next(r for r in rows if r["servers"] == n)["tokens_per_second"]
                traffic = ["" if row[key] is None else f"{row[key]:,.0f}" for key in ("bytes_median", "bytes_largest")]
                print(f"| {n or 'none'} | {arm} | {row['tokens_per_second']:.1f} | {row['median_ms']:.1f} | "
                      f"{row['tokens_per_second'] / base:.2f} x | {traffic[0]} | {traffic[1]} |", flush=True)
    print(f"\n{os.path.basename(options.model)}, {options.tokens} tokens, {options.steps} steps, {options.threads} threads "
          f"each; {processor()}, {os.cpu_count()} cores; all servers on this machine")
    if options.json:
        with open(options.json, "w", encoding="ascii") as file:
            json.dump(dict(model=os.path.basename(options.model), tokens=options.tokens, steps=options.steps,
                           threads=options.threads, processor=processor(), rows=rows), file, indent=1)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Failure, RuntimeError) as failure:
        sys.exit(f"bench-rpc: {failure}")
