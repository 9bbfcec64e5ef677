# SPDX-License-Identifier: Apache-2.0
"""llama-server, unmodified, with the plugin, through everything that it does to its cache.

usage: server_test.py CASE PLUGIN BIN_DIR SERVER_MODEL

SERVER_MODEL is the program that writes the model. Cases:
  exact   mode exact, a bf16 V cache (ggml sums its values in f32): the answers of the server without the plugin
  sparse  the sparse operator with every cluster opened, likewise
  copies  the same with preset seed, which reads copies of its own: an outdated plan shows
  fresh   the default f16 cache, exact and sparse: the answers of a server that decodes each prompt from its beginning
  memory  SCSA_SERVER_TEST_REQUESTS short requests (500) that calibrate, cluster and audit: resident memory stays flat

Prompts are token numbers. SCSA_SERVER_TEST_MODEL names another model in place of the written one, with
SCSA_SERVER_TEST_HEADS query and SCSA_SERVER_TEST_KV_HEADS KV heads per layer. SCSA_SERVER_TEST_PRELOAD names a library
that is loaded before the plugin: the runtime of the sanitizer that the plugin is built with.
"""
import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

FIRST_WORD, WORDS = 259, 253
SLOTS = 4
# The written model's logits have a standard deviation of about 0.8. What may separate two right answers is below 2^-7
# of that (cache_lockstep.cc), with f16 sums or q8_0 copies a few times as much; a wrong cell moves logits by tens of
# that.
TIE = 0.05


class Failure(Exception):
    pass


def words(seed, n):
    draw = random.Random(seed)
    return [FIRST_WORD + draw.randrange(WORDS) for _ in range(n)]


class Server:
    """A llama-server on a free port. plugin: the environment that it gets, None: without the plugin."""

    def __init__(self, test, name, arguments, plugin):
        self.name = name
        self.saved = os.path.join(test.work, name + "-slots")
        os.mkdir(self.saved)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        env = {k: v for k, v in os.environ.items()
               if not k.startswith(("SCSA_", "LLAMA_")) and k not in ("LD_PRELOAD", "GGML_BACKEND_PATH")}
        env["OMP_WAIT_POLICY"] = "passive"  # so that a busy machine does not slow the tests down
        if plugin is not None:
            # The runtime of a sanitizer, where the plugin is built with one, must come first.
            preload = " ".join(filter(None, [os.environ.get("SCSA_SERVER_TEST_PRELOAD"), test.plugin]))
            env.update(plugin, LD_PRELOAD=preload, GGML_BACKEND_PATH=test.plugin, SCSA_STATS="1")
        command = [os.path.join(test.bin, "llama-server"), "-m", test.model, "--host", "127.0.0.1", "--port",
                   str(self.port), "-t", "1", "-np", str(SLOTS), "--slot-save-path", self.saved, "--no-warmup",
                   *arguments]
        self.log = os.path.join(test.work, name + ".log")
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        for _ in range(600):
            if self.process.poll() is not None:
                break
            with contextlib.suppress(OSError):
                if self.request("GET", "/health")[0] == 200:
                    return
            time.sleep(0.1)
        self.kill()
        raise Failure(f"llama-server ({name}) does not answer")

    def request(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            connection.request(method, path, None if body is None else json.dumps(body),
                               {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()

    def complete(self, prompt, n, slot, stream=False, stop_after=None, **more):
        """The chosen tokens, each as (token, its logprob, logprob of the second best).

        stop_after: closes the connection after so many tokens.
        """
        body = dict(prompt=prompt, n_predict=n, id_slot=slot, stream=stream, temperature=0, n_probs=2, ignore_eos=True,
                    cache_prompt=True, **more)
        tokens = []

        def take(answer):
            for p in answer.get("completion_probabilities", []):
                tokens.append((p["id"], p["logprob"], sorted(t["logprob"] for t in p["top_logprobs"])[-2]))

        if not stream:
            status, text = self.request("POST", "/completion", body)
            if status != 200:
                raise Failure(f"{self.name} answers {status}: {text}")
            take(json.loads(text))
            return tokens
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            for line in response:
                if line.startswith(b"error"):
                    raise Failure(f"{self.name}: {line.decode()}")
                # The last message repeats nothing: it has no probabilities of its own.
                if line.startswith(b"data: {"):
                    answer = json.loads(line[len(b"data: "):])
                    if not answer.get("stop"):
                        take(answer)
                if stop_after is not None and len(tokens) >= stop_after:
                    connection.sock.shutdown(socket.SHUT_RDWR)
                    break
        return tokens

    def slot(self, slot, action, file=None):
        status, text = self.request("POST", f"/slots/{slot}?action={action}", {"filename": file} if file else {})
        if status != 200:
            raise Failure(f"{self.name}: {action} of slot {slot} answers {status}: {text}")
        return json.loads(text)

    def slot_context(self):
        return json.loads(self.request("GET", "/props")[1])["default_generation_settings"]["n_ctx"]

    def resident_kib(self):
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as status:
            return int(re.search(r"^VmRSS:\s+(\d+) kB", status.read(), re.M).group(1))

    def stop(self):
        """Ends it as a user does; the plugin's summary as a dict where it is loaded."""
        if self.process.poll() is not None:
            raise Failure(f"{self.name} ended by itself with {self.process.returncode}")
        self.process.send_signal(signal.SIGINT)
        try:
            status = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Failure(f"{self.name} does not stop") from None
        if status != 0:
            raise Failure(f"{self.name} ended with {status}")
        with open(self.log, encoding="utf-8", errors="replace") as log:
            text = log.read()
        if "calibrating instead" in text:
            raise Failure(f"{self.name}: the thresholds do not fit the model")
        if not (summary := re.search(r"^scsa: attention calls .*", text, re.M)):
            return None
        figures = {k: int(n) for k, n in re.findall(r"(sparse|exact|calibration) (\d+)", summary.group(0))}
        figures["failures"] = int(re.search(r"(\d+) failures", text).group(1))
        return figures

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Test:
    def __init__(self, plugin, bin_dir, work, model):
        self.plugin, self.bin, self.work, self.model = plugin, bin_dir, work, model
        self.servers = []
        self.compared = self.ties = 0
        self.worst = 0.0

    def server(self, name, arguments, plugin):
        server = Server(self, name, arguments, plugin)
        self.servers.append(server)
        return server

    def compare(self, what, got, expected, n):
        """Equal answers, up to a token for which two candidates are as good as equal."""
        if len(got) != n or len(expected) != n:
            raise Failure(f"{what}: {len(got)} and {len(expected)} tokens, not {n}")
        for i, (a, b) in enumerate(zip(got, expected)):
            self.compared += 1
            difference = abs(a[1] - b[1])
            if a[0] != b[0] and a[1] - a[2] < TIE and b[1] - b[2] < TIE:
                self.ties += 1
                return
            if a[0] != b[0] or difference > TIE:
                raise Failure(f"{what}: token {i} is {a}, should be {b}")
            self.worst = max(self.worst, difference)

    def finish(self, server, expect):
        figures = server.stop()
        if (figures is None) != (expect is None):
            raise Failure(f"{server.name}: the plugin's summary is {figures}")
        if figures is None:
            return
        if figures["failures"] != 0:
            raise Failure(f"{server.name}: {figures['failures']} failures in the plugin")
        for path in expect:
            if figures[path] < 100:
                raise Failure(f"{server.name}: {figures[path]} {path} attention calls")


SYSTEM = words(1, 1000)


def conversation(server):
    """(what, prompt, answer, whether a fresh server would say the same) of each request."""
    requests = []

    def add(what, prompt, n, slot, fresh=True, **more):
        requests.append((what, prompt, server.complete(prompt, n, slot, **more), n, fresh))

    def at_once(what, prompts, n):
        answers = [None] * SLOTS
        def run(slot):
            with contextlib.suppress(OSError, Failure, ValueError):
                answers[slot] = server.complete(prompts[slot], n, slot, stream=slot % 2 == 1)
        threads = [threading.Thread(target=run, args=(slot,)) for slot in range(SLOTS)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        for slot, answer in enumerate(answers):
            if answer is None:
                raise Failure(f"{server.name}: no answer ({what}, slot {slot})")
            requests.append((f"{what}, slot {slot}", prompts[slot], answer, n, True))

    turns = [SYSTEM + words(10 + s, 20 + 30 * s) for s in range(SLOTS)]
    at_once("a shared system prompt", turns, 24)
    # What the model said is replaced: cells are removed and filled anew.
    turns = [turns[s] + words(20 + s, 40) for s in range(SLOTS)]
    at_once("a second turn", turns, 24)

    # Cancelled in mid-stream, then another text in the same cells.
    partial = server.complete(turns[0] + words(30, 5), 300, 0, stream=True, stop_after=8)
    if len(partial) < 8:
        raise Failure("a stream ended early")
    add("after a cancelled one", SYSTEM[:700] + words(31, 330), 24, 0)

    # Saved, overwritten by a text of the same length, restored into the same cells and into others.
    add("before saving", turns[1], 2, 1)
    server.slot(1, "save", "one.bin")
    add("another text of the same length", words(40, len(turns[1])), 24, 1)
    server.slot(1, "restore", "one.bin")
    add("restored", turns[1] + words(41, 3), 24, 1)
    server.slot(3, "restore", "one.bin")
    add("restored elsewhere", turns[1] + words(42, 3), 24, 3)
    server.slot(2, "erase")
    add("after an erased slot", words(43, 900), 24, 2)

    # Chunks that are kept move to other positions: not what a fresh server computes.
    parts = [words(50 + i, 250) for i in range(5)]
    add("before reuse", sum(parts, []), 8, 2)
    add("cache reuse with two chunks removed", parts[0] + parts[2] + parts[4] + words(56, 9), 24, 2, fresh=False,
        n_cache_reuse=64)

    # Two shifts of a full context. Without the other slots, for one cache that all share must not overflow.
    for slot in range(SLOTS):
        server.slot(slot, "erase")
    full = server.slot_context() - 30
    add("a context shift", words(60, full), 140, 0, fresh=False, n_keep=64, n_discard=64)
    add("after a shift", SYSTEM + words(61, 33), 24, 0)
    return requests


def opened(work, preset="fast"):
    """Thresholds of 0: every cluster is opened. Layers that the model does not have do no harm, heads do: preset fast has
    a threshold per KV head, preset seed per query head."""
    name, written = ("KV_HEADS", 2) if preset == "fast" else ("HEADS", 4)
    heads = int(os.environ.get("SCSA_SERVER_TEST_" + name) or written)
    path = os.path.join(work, preset + ".json")
    with open(path, "w", encoding="ascii") as file:
        json.dump({f"{layer}:{head}": 0 for layer in range(256) for head in range(heads)}, file)
    return {"SCSA_PRESET": preset, "SCSA_CROSSOVER": "0", "SCSA_TAUS": path}


OWN_STREAMS = ["-c", str(2048 * SLOTS), "--no-kv-unified", "--context-shift"]
ONE_STREAM = ["-c", "6144", "--kv-unified", "--context-shift"]
SUMMED_IN_F32 = ["-ctv", "bf16"]


def against_no_plugin(test, plugin, paths):
    for layout, arguments in (("own-streams", OWN_STREAMS), ("one-stream", ONE_STREAM)):
        answers = []
        for name, env in (("without", None), ("with", plugin)):
            server = test.server(f"{layout}-{name}", arguments + SUMMED_IN_F32, env)
            answers.append(conversation(server))
            test.finish(server, None if env is None else paths)
        for theirs, ours in zip(*answers):
            test.compare(f"{layout}, {ours[0]}", ours[2], theirs[2], ours[3])


def case_exact(test):
    against_no_plugin(test, {"SCSA_MODE": "exact"}, ["exact"])


def case_sparse(test):
    against_no_plugin(test, opened(test.work), ["sparse"])


def case_copies(test):
    against_no_plugin(test, opened(test.work, "seed"), ["sparse"])


def case_fresh(test):
    for name, env, path in (("exact", {"SCSA_MODE": "exact"}, "exact"), ("sparse", opened(test.work), "sparse")):
        server = test.server(name, OWN_STREAMS, env)
        requests = conversation(server)
        test.finish(server, [path])
        fresh = test.server(name + "-fresh", OWN_STREAMS, env)
        for what, prompt, answer, n, comparable in requests:
            if comparable:
                fresh.slot(0, "erase")
                test.compare(f"{name}, {what}", answer, fresh.complete(prompt, n, 0), n)
        test.finish(fresh, [path])


def case_memory(test):
    n = int(os.environ.get("SCSA_SERVER_TEST_REQUESTS") or 500)
    # Prompts of idle slots would be kept in memory, by llama.cpp.
    server = test.server("requests", OWN_STREAMS + ["--cache-ram", "0"],
                         {"SCSA_CROSSOVER": "0", "SCSA_CALIBRATE": "4", "SCSA_AUDIT": "0.05"})
    resident = []
    for i in range(n):
        # Mostly a shared beginning, sometimes another text; lengths that build and drop plans.
        prompt = SYSTEM[:random.Random(i).randrange(300, 1000)] + words(1000 + i, 30) if i % 10 else words(1000 + i, 1200)
        if len(server.complete(prompt, 4, i % SLOTS)) != 4:
            raise Failure(f"request {i}: not 4 tokens")
        resident.append(server.resident_kib())
    test.finish(server, ["sparse"])
    first, rest = max(resident[:100]), max(resident[100:])
    # Half of what the first 100 requests added at most once more: a plan kept per request would add many times that.
    bound = first + max((first - resident[0]) // 2, 4096)
    print(f"resident: {resident[0]} KiB after the first request, at most {first} in the first 100, {rest} later")
    if rest > bound:
        raise Failure(f"resident memory grows from {first} to {rest} KiB, bound {bound}")


def main():
    case, plugin, bin_dir, writer = sys.argv[1:]
    with tempfile.TemporaryDirectory() as work:
        model = os.environ.get("SCSA_SERVER_TEST_MODEL") or os.path.join(work, "model.gguf")
        if not os.path.exists(model):
            subprocess.run([writer, model], check=True)
        test = Test(plugin, bin_dir, work, model)
        try:
            {"exact": case_exact, "sparse": case_sparse, "copies": case_copies, "fresh": case_fresh,
             "memory": case_memory}[case](test)
            if test.ties > 2 + test.compared // 100:
                raise Failure(f"{test.ties} ties among {test.compared} tokens")
        except Failure as failure:
            for server in test.servers:
                with open(server.log, encoding="utf-8", errors="replace") as log:
                    print(f"--- {server.name}\n" + "".join(log.readlines()[-15:]), file=sys.stderr)
            print(f"FAILED: {failure}", file=sys.stderr)
            return 1
        finally:
            for server in test.servers:
                server.kill()
        print(f"{test.compared} tokens compared, worst logprob {test.worst:.4f} apart, {test.ties} ties")
    return 0


if __name__ == "__main__":
    sys.exit(main())
