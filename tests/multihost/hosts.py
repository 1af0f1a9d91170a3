"""Hosts on one machine: Linux namespaces with addresses, shared memory, processes and a host name of their own.

A host is one process that does nothing and the namespaces it lives in; all else runs in them by `nsenter`. Nothing has
a name that outlives it: when that process dies, and it dies with the tests, the kernel ends every process of the host
and takes its interfaces away. What hosts share is the file system, apart from /dev/shm and Ray's directory in /tmp.

The hosts hang on a switch, a namespace with a bridge, to which this process has a cable, too.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

# Addresses that RFC 2544 keeps for such tests; one of 256 networks is taken that no other run on this machine has.
NETWORK = "198.18.{number}."
SWITCH, CLIENT = 254, 253
SHARED_MEMORY_MB = 192
# Locally administered addresses: one that no interface here has, so that frames to it go nowhere, and the switch's.
NOBODY, BRIDGE = "02:00:00:00:00:fe", "02:00:00:00:00:01"
# Ray puts its sessions there unless told otherwise, and its sockets' paths must be short.
RAY_DIRECTORY = Path("/tmp/ray")
TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "mount")
# Waits for ever, and its children that others left are gone at once: zombies would be taken for processes.
DO_NOTHING = ("sh", "-c", "trap '' CHLD; echo up; exec sleep infinity")


def why_no_hosts() -> str:
    """Why this machine cannot make hosts; "" when it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "making network namespaces takes root on Linux"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"making hosts takes {', '.join(missing)} (Debian: iproute2, util-linux)"
    probe = (
        "mount -t tmpfs tmpfs /dev/shm && ip link add probe0 type bridge"
        " && ip link add probe1 type veth peer name probe2"
        " && tc qdisc add dev probe1 root handle 1: htb"
        " && tc filter add dev probe1 parent 1: protocol ip u32 match ip dst 198.18.0.1 flowid 1:1"
    )
    done = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "sh", "-c", probe],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"this kernel refuses: {done.stderr.strip()}" if done.returncode else ""


@dataclass
class Namespace:
    """One place for processes; `pid` is of the process that holds it."""

    name: str
    holder: "subprocess.Popen[str]"
    pid: int
    home: Path

    @property
    def alive(self) -> bool:
        return self.holder.poll() is None

    def command(self, words: Sequence[str | Path]) -> list[str]:
        inside = ["nsenter", "--target", str(self.pid), "--net", "--mount", "--uts", "--pid", f"--wd={self.home}", "--"]
        return [*inside, *map(str, words)]

    def run(self, *words: str | Path) -> str:
        """Run a command there to its end; its output. Raises AssertionError with what it said when it fails."""
        done = subprocess.run(self.command(words), capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, f"{self.name}: {' '.join(map(str, words))}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, *words: str | Path, environment: Mapping[str, str], log: Path) -> "subprocess.Popen[bytes]":
        """Start a command there whose output goes to `log`."""
        with log.open("ab") as output:
            return subprocess.Popen(
                self.command(words), env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def kill(self) -> None:
        """End all of its processes at once, as a loss of power does, and take its interfaces away. Idempotent."""
        self.holder.kill()  # `unshare`, whose death kills the first process of the namespace
        self.holder.wait()
        wait_until(lambda: not Path(f"/proc/{self.pid}").exists(), within_s=60, what=f"the end of {self.name}")


@dataclass
class Host(Namespace):
    """A machine of the network."""

    address: str = ""

    def cut(self, other: "Host") -> None:
        """What either sends to the other is lost without a word, on connections that are open, too."""
        for here, there in ((self, other), (other, self)):
            here.run("ip", "neigh", "replace", there.address, "lladdr", NOBODY, "nud", "permanent", "dev", "eth0")

    def heal(self, other: "Host") -> None:
        """Take `cut` back."""
        for here, there in ((self, other), (other, self)):
            here.run("ip", "neigh", "del", there.address, "dev", "eth0")

    @contextmanager
    def cut_off_from(self, other: "Host") -> Iterator[None]:
        self.cut(other)
        try:
            yield
        finally:
            self.heal(other)

    @contextmanager
    def slow_to(self, other: "Host", *, kilobit_per_s: int, queue_packets: int) -> Iterator[None]:
        """What this host sends to the other goes no faster, and what comes while so many packets wait is lost."""
        self.run("ip", "link", "set", "eth0", "gso_max_size", "1500", "gso_max_segs", "1")  # packets as on a real cable
        self.run("tc", "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "htb")
        try:
            self.run("tc", "class", "add", "dev", "eth0", "parent", "1:", "classid", "1:1", "htb",
                     "rate", f"{kilobit_per_s}kbit", "burst", "1600")  # fmt: skip
            self.run("tc", "qdisc", "add", "dev", "eth0", "parent", "1:1", "pfifo", "limit", str(queue_packets))
            self.run("tc", "filter", "add", "dev", "eth0", "parent", "1:", "protocol", "ip", "u32",
                     "match", "ip", "dst", other.address, "flowid", "1:1")  # fmt: skip
            yield
        finally:
            self.run("tc", "qdisc", "del", "dev", "eth0", "root")

    def sent_slowly(self) -> tuple[int, int]:
        """Bytes that went the slow way since it is slow, and packets that were lost there."""
        said = self.run("tc", "-s", "class", "show", "dev", "eth0")
        found = re.search(r"Sent (\d+) bytes \d+ pkt \(dropped (\d+)", said)
        assert found, said
        return int(found[1]), int(found[2])

    def pids(self, title: str) -> list[int]:
        """Process ids, as this machine sees them, of the host's processes whose title begins so."""
        here = os.stat(f"/proc/{self.pid}/ns/pid").st_ino
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                inside = os.stat(entry / "ns/pid").st_ino == here
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if inside and line and line.startswith(title):
                found.append(int(entry.name))
        return found

    def kill_processes(self) -> None:
        """Kill whatever runs there; the host itself stays, with its addresses, as after a restart."""

        def all_gone() -> bool:
            left = [pid for pid in self.pids("") if pid != self.pid]
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not left

        wait_until(all_gone, within_s=60, what=f"the end of all processes on {self.name}")


Place = TypeVar("Place", bound=Namespace)


class Network:
    """A switch with hosts on it. Closing it ends all of them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._hosts: list[Host] = []
        self.number = _free_network()
        self.switch = self._namespace("switch", Namespace)
        self._cable = f"hrt{os.getpid()}-{self.number}"[:15]
        # An address of its own: else it has that of one of its ports, and another one when that port goes.
        self.switch.run("ip", "link", "add", "br0", "address", BRIDGE, "type", "bridge")
        self.switch.run("ip", "addr", "add", f"{self.address_of(SWITCH)}/24", "dev", "br0")
        for interface in ("lo", "br0"):
            self.switch.run("ip", "link", "set", interface, "up")
        _ip("link", "add", self._cable, "type", "veth", "peer", "name", "client", "netns", str(self.switch.pid))
        self._plug("client")
        _ip("addr", "add", f"{self.address_of(CLIENT)}/24", "dev", self._cable)
        _ip("link", "set", self._cable, "up")

    def address_of(self, number: int) -> str:
        return NETWORK.format(number=self.number) + str(number)

    def add_host(self, name: str) -> Host:
        """A new machine with the next address, its own home, and nothing running."""
        number = 1 + len(self._hosts)
        host = self._namespace(name, Host)
        self._hosts.append(host)
        host.address, port = self.address_of(number), f"port{number}"
        ends = ("netns", str(self.switch.pid), "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
        _ip("link", "add", port, *ends)
        self._plug(port)
        host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            host.run("ip", "link", "set", interface, "up")
        # Ray looks which interface leads to the outside.
        host.run("ip", "route", "add", "default", "via", self.address_of(SWITCH))
        host.run("mount", "-t", "tmpfs", "-o", f"size={SHARED_MEMORY_MB}m,mode=1777", "tmpfs", "/dev/shm")
        (host.home / "ray").mkdir()
        RAY_DIRECTORY.mkdir(exist_ok=True)
        host.run("mount", "--bind", host.home / "ray", RAY_DIRECTORY)
        host.run("hostname", name)
        # No name server is there to be asked, and waited for.
        (host.home / "resolv.conf").touch()
        (host.home / "hosts").write_text(f"127.0.0.1 localhost\n{host.address} {name}\n", encoding="utf-8")
        for file in ("resolv.conf", "hosts"):
            host.run("mount", "--bind", host.home / file, f"/etc/{file}")
        return host

    def close(self) -> None:
        """End every process of every host, and the network. Idempotent."""
        for place in (*self._hosts, self.switch):
            place.holder.kill()
        for place in (*self._hosts, self.switch):
            place.kill()

    def _plug(self, port: str) -> None:
        self.switch.run("ip", "link", "set", port, "master", "br0")
        self.switch.run("ip", "link", "set", port, "up")

    def _namespace(self, name: str, kind: type[Place]) -> Place:
        home = self._directory / name
        home.mkdir()
        holder = subprocess.Popen(
            [
                "setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--mount", "--uts", "--pid", "--fork",
                "--kill-child", "--mount-proc", *DO_NOTHING,
            ],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )  # fmt: skip
        assert holder.stdout is not None
        assert holder.stdout.readline() == "up\n"
        (pid,) = map(int, Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split())
        return kind(name=name, holder=holder, pid=pid, home=home)


def _free_network() -> int:
    routes = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=True).stdout
    first = os.getpid() % 256
    numbers = (*range(first, 256), *range(first))
    return next(number for number in numbers if NETWORK.format(number=number) not in routes)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


def wait_until(holds: Callable[[], object], *, within_s: float, what: str) -> None:
    """Poll until it holds; AssertionError naming what did not come about."""
    give_up_at = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < give_up_at, f"not within {within_s} s: {what}"
        time.sleep(0.1)
