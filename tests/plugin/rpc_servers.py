# SPDX-License-Identifier: Apache-2.0
"""ggml-rpc-servers on one machine, each in a network of its own where the system allows that.

isolate() first: it starts the program again inside a network namespace, in which it may make others. They vanish with
its processes. Where the system does not allow namespaces the servers listen on ports of 127.0.0.1.
"""
import os
import re
import socket
import subprocess
import sys
import time

INSIDE = "RPC_SERVERS_INSIDE"
PORT = 50052


def isolate():
    if INSIDE in os.environ:
        return
    probe = "ip link set lo up && ip link add probe type veth peer name probe-peer && ip link del probe"
    for namespaces in (["--user", "--map-root-user", "--net"], ["--net"]):
        try:
            allowed = subprocess.run(["unshare", *namespaces, "sh", "-c", probe], capture_output=True).returncode == 0
        except FileNotFoundError:
            break
        if allowed:
            os.environ[INSIDE] = "1"
            inner = 'ip link set lo up && exec "$@"'
            os.execvp("unshare", ["unshare", *namespaces, "sh", "-c", inner, "sh", sys.executable, *sys.argv])
    os.environ[INSIDE] = ""
    print("no network namespaces here (packages util-linux, iproute2): servers on ports of 127.0.0.1")


def without_plugin():
    """The environment without what this project reads from it."""
    env = {k: v for k, v in os.environ.items()
           if not k.startswith(("SCSA_", "LLAMA_")) and k not in ("LD_PRELOAD", "GGML_BACKEND_PATH", INSIDE)}
    # Servers take turns: one that waits must not spin on the cores of the next.
    env["OMP_WAIT_POLICY"] = "passive"
    return env


class RpcServer:
    """One ggml-rpc-server. plugin: its file, None: without. more: environment. log: the file for its output."""

    made = 0

    def __init__(self, program, plugin, more, threads, log):
        self.log = log
        env = without_plugin()
        if plugin is not None:
            env.update(more, GGML_BACKEND_PATH=plugin, SCSA_DEVICE="cpu", SCSA_STATS="1")
        self.link = None
        command = []
        if os.environ[INSIDE]:
            RpcServer.made += 1
            self.link = f"rpc{RpcServer.made}"
            network = f"10.77.{RpcServer.made}"
            self.address, port = f"{network}.2", PORT
            # Says when it is in its namespace, and waits until that one has its link.
            command = ["unshare", "--net", "sh", "-c",
                       f'echo && read -r _ && ip addr add {self.address}/24 dev eth0 && ip link set eth0 up && '
                       'exec "$@" >"$LOG" 2>&1', "sh"]
            env["LOG"] = log
        else:
            self.address = "127.0.0.1"
            with socket.socket() as free:
                free.bind((self.address, 0))
                port = free.getsockname()[1]
        self.endpoint = f"{self.address}:{port}"
        command += [program, "-H", self.address, "-p", str(port), "-t", str(threads)]
        if self.link is not None:
            self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self.process.stdout.readline()
            for arguments in (["link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns",
                               str(self.process.pid)],
                              ["addr", "add", f"{network}.1/24", "dev", self.link], ["link", "set", self.link, "up"]):
                subprocess.run(["ip", *arguments], check=True)
            self.process.stdin.write(b"\n")
            self.process.stdin.close()
        else:
            with open(log, "wb") as file:
                self.process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        for _ in range(300):
            try:
                socket.create_connection((self.address, port), timeout=1).close()
                return
            except OSError:
                if self.process.poll() is not None:
                    break
                time.sleep(0.1)
        raise RuntimeError(f"ggml-rpc-server does not listen on {self.endpoint}: see {log}")

    def text(self):
        with open(self.log, encoding="utf-8", errors="replace") as log:
            return log.read()

    def bytes(self):
        """(to the server, from it) since its start, headers included; None where the network is shared."""
        if self.link is None:
            return None
        with open("/proc/net/dev", encoding="ascii") as devices:
            fields = re.search(rf"^ *{self.link}:(.*)$", devices.read(), re.M).group(1).split()
        return int(fields[8]), int(fields[0])

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
