# SPDX-License-Identifier: Apache-2.0
"""A model whose layers lie on several unmodified ggml-rpc-servers, each with the plugin's device for whole graphs.

usage: rpc_test.py CASE PLUGIN BIN_DIR SERVER_MODEL

SERVER_MODEL is the program that writes the model. Cases:
  two, four  so many servers: the answers of one process, in mode exact and with every cluster opened
  rows       two servers that calibrate themselves: fewer rows are read than are visible, on each of them; a second
             client finds no plans of the first
  killed     a server dies during an answer: the client ends and says why, the other server takes the next client
"""
import os
import re
import subprocess
import sys
import tempfile
import time

import rpc_servers
from server_test import Failure, Test, opened, words

# The output counts as one more when layers are shared out evenly.
LAYERS = 7
PROMPT = words(70, 1100)
MORE = words(71, 40)
N = 24


class RpcTest(Test):
    def start(self, n, env):
        self.rpc = [rpc_servers.RpcServer(os.path.join(self.bin, "ggml-rpc-server"), self.plugin, env, 1,
                                          os.path.join(self.work, f"rpc-{i}-{len(self.servers)}.log"))
                    for i in range(n)]

    def client(self, name, context=4096):
        return self.server(name, ["-c", str(context), "-np", "1", "-ngl", "99", "--rpc",
                                  ",".join(s.endpoint for s in self.rpc), "-ts", ",".join("1" for _ in self.rpc)],
                           None)

    def summaries(self, server):
        """What the plugin counted when each client left. A client's end and its server's notice of it are apart."""
        pattern = (r"sparse (\d+), exact (\d+), calibration (\d+),.*\nscsa: rows read ([\d.]+) %.*\n"
                   r"scsa: plans ([\d.]+) MB.*, (\d+) failures, (\d+) layers calibrated")
        for _ in range(100):
            found = re.findall(pattern, server.text())
            if found:
                return [dict(zip(("sparse", "exact", "calibration", "rows", "plans", "failures", "calibrated"),
                                 map(float, figures))) for figures in found]
            time.sleep(0.1)
        raise Failure(f"no summary in {server.log}")

    def stop(self):
        for server in self.rpc:
            server.kill()


def answers(server):
    """A prompt, and another turn in the same cache."""
    first = server.complete(PROMPT, N, 0)
    return first, server.complete(PROMPT + [t for t, _, _ in first] + MORE, N, 0)


def against_one_process(test, n):
    for name, env, path in (("exact", {"SCSA_MODE": "exact"}, "exact"), ("sparse", opened(test.work), "sparse")):
        # Repacked weights are multiplied by other kernels, which the servers do not have.
        one = test.server(f"{name}-one", ["-c", "4096", "-np", "1", "--no-repack"], env)
        expected = answers(one)
        test.finish(one, [path])
        test.start(n, env)
        client = test.client(f"{name}-{n}")
        for turn, (got, right) in enumerate(zip(answers(client), expected)):
            test.compare(f"{name}, {n} servers, turn {turn}", got, right, N)
        client.stop()
        # Each server answers every decoded token of its own layers; the last one has the output, too.
        per_server = 2 * (N - 1) * ((LAYERS + 1) // n - 1)
        for server in test.rpc:
            figures = test.summaries(server)[-1]
            if figures[path] < per_server or figures["failures"] != 0:
                raise Failure(f"{name}: {server.log}: {figures}, expected {per_server} {path} calls")
        test.stop()


def case_rows(test):
    test.start(2, {"SCSA_CROSSOVER": "512", "SCSA_TOLERANCE": "0.1"})
    for context in (4096, 8192):
        client = test.client(f"client-{context}", context)
        answers(client)
        client.stop()
        time.sleep(0.5)
    for server in test.rpc:
        counted = test.summaries(server)
        if len(counted) < 2:
            raise Failure(f"{server.log}: two clients, {len(counted)} summaries")
        for figures in counted:
            if figures["sparse"] == 0 or not 0 < figures["rows"] < 95 or figures["failures"] != 0:
                raise Failure(f"{server.log}: {figures}")
            if figures["calibrated"] > (LAYERS + 1) // 2:
                raise Failure(f"{server.log}: plans of a client that is gone: {figures}")
    test.stop()


def case_killed(test):
    test.start(2, {"SCSA_MODE": "exact"})
    client = test.client("client")
    client.complete(PROMPT, N, 0)
    test.rpc[1].kill()
    try:
        client.complete(PROMPT + MORE, N, 0)
        raise Failure("the client answers without one of its servers")
    except OSError:
        pass
    try:
        status = client.process.wait(60)
    except subprocess.TimeoutExpired:
        raise Failure("the client hangs") from None
    with open(client.log, encoding="utf-8", errors="replace") as log:
        text = log.read()
    if status == 0 or "Remote RPC server crashed" not in text:
        raise Failure(f"the client ended with {status} and does not say that a server is gone")
    expected = test.server("one", ["-c", "4096", "-np", "1", "--no-repack"], {"SCSA_MODE": "exact"})
    dead = test.rpc.pop()
    next_client = test.client("next")
    for got, right in zip(answers(next_client), answers(expected)):
        test.compare("the next client", got, right, N)
    next_client.stop()
    dead.kill()
    test.stop()


def main():
    rpc_servers.isolate()
    case, plugin, bin_dir, writer = sys.argv[1:]
    if not os.path.exists(os.path.join(bin_dir, "ggml-rpc-server")):
        print(f"SKIPPED: {bin_dir} holds no ggml-rpc-server (llama.cpp was configured without GGML_RPC)")
        return 77
    with tempfile.TemporaryDirectory() as work:
        model = os.path.join(work, "model.gguf")
        subprocess.run([writer, model, str(LAYERS)], check=True)
        test = RpcTest(plugin, bin_dir, work, model)
        test.rpc = []
        try:
            {"two": lambda t: against_one_process(t, 2), "four": lambda t: against_one_process(t, 4),
             "rows": case_rows, "killed": case_killed}[case](test)
            if test.ties > 0:
                raise Failure(f"{test.ties} ties among {test.compared} tokens")
        except (Failure, RuntimeError) as failure:
            for log in [s.log for s in test.servers + test.rpc]:
                with open(log, encoding="utf-8", errors="replace") as file:
                    print(f"--- {os.path.basename(log)}\n" + "".join(file.readlines()[-15:]), file=sys.stderr)
            print(f"FAILED: {failure}", file=sys.stderr)
            return 1
        finally:
            for server in test.servers + test.rpc:
                server.kill()
        print(f"{test.compared} tokens compared, worst logprob {test.worst:.6f} apart")
    return 0


if __name__ == "__main__":
    sys.exit(main())
