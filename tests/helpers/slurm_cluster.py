"""A real SLURM cluster on this machine for as long as a test needs it: munged, slurmctld and a slurmd per node.

Where root may make namespaces, every node has a network, a hostname and an /etc/hosts of its own, so that a rendezvous
on 127.0.0.1 fails as it would between machines; elsewhere several slurmd share the host. No systemd, no files outside
the cluster's folder. Whatever was started ends with `stop`, by process number.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from tests.helpers.commands import environment, until

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
_NETWORK = "10.77.0"


def missing() -> str | None:
    """Why no cluster can be started here; None if one can."""
    absent = [name for name in DAEMONS if shutil.which(name, path=_PATH) is None]
    return f"needs {', '.join(absent)}: apt-get install slurm-wlm munge" if absent else None


def namespaces() -> bool:
    """Whether this user may make network namespaces."""
    tools = shutil.which("ip", path=_PATH) and shutil.which("unshare") and shutil.which("nsenter")
    made = tools and subprocess.run(["unshare", "-n", "-u", "-m", "true"], capture_output=True, check=False)
    return bool(made) and made.returncode == 0


def _ports(count: int) -> int:
    """The first of `count` free ports below those that the kernel gives out itself."""
    while True:
        first, sockets = random.randrange(20000, 32000), []
        try:
            for port in range(first, first + count):
                sockets.append(socket.socket())
                sockets[-1].bind(("0.0.0.0", port))  # noqa: S104
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
        return first


class Cluster:
    """A cluster of `nodes` nodes of `cpus` cores each.

    Args:
        nodes: of the one partition.
        cpus: of each, as SLURM counts them.
        separate: whether nodes have namespaces of their own; where that is possible unless given.
    """

    def __init__(self, nodes: int = 2, cpus: int = 2, separate: bool | None = None) -> None:
        self.nodes, self.cpus = nodes, cpus
        # A short path that others may pass: munged refuses its socket elsewhere.
        self.directory = directory = Path(tempfile.mkdtemp(prefix="slurm-"))
        directory.chmod(0o755)
        self.separate = namespaces() if separate is None else separate
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._conf = directory / "slurm.conf"

    # Start and stop.

    def start(self) -> None:
        for name in ("munge", "state", "log", *(f"spool/node{n}" for n in range(1, self.nodes + 1))):
            (self.directory / name).mkdir(parents=True)
        (self.directory / "munge").chmod(0o755)
        self._conf.write_text(self._configuration())
        (self.directory / "munge" / "key").write_bytes(random.randbytes(128))
        (self.directory / "munge" / "key").chmod(0o600)
        self._munge()
        if self.separate:
            self.network()
        self._command("slurmctld")
        for number in range(1, self.nodes + 1):
            self.start_node(number)
        until(lambda: self.run("sinfo", "-h", "-N", "-o", "%T").stdout.split() == ["idle"] * self.nodes, 60, 0.1)

    def stop(self) -> None:
        with contextlib.suppress(subprocess.SubprocessError, AssertionError):
            if (self.directory / "slurmctld.pid").exists():
                self.run("scancel", "-u", getpass.getuser())
                until(lambda: not self.run("squeue", "-h", "-t", "R,CG,S").stdout.strip(), 20, 0.1)
        files = [
            *self.directory.glob("slurmd.*.pid"),
            self.directory / "slurmctld.pid",
            self.directory / "munge" / "pid",
        ]
        for process in filter(None, map(_daemon, files)):
            os.kill(process, signal.SIGTERM)
            with contextlib.suppress(AssertionError):
                until(partial(_ended, process), 5)
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for holder in self._holders.values():
            holder.kill()
            holder.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def processes(self, node: str | None = None, word: str = "") -> list[int]:
        """Processes with this cluster's configuration: its daemons, and what jobs started. Not this one.

        Args:
            node: only those of that node's jobs.
            word: only those with it in their command line, which srun carries too but does not do.
        """
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                variables = (entry / "environ").read_bytes().split(b"\0")
                ours = f"SLURM_CONF={self._conf}".encode() in variables and entry.name != str(os.getpid())
                there = node is None or f"SLURMD_NODENAME={node}".encode() in variables
                if (entry / "comm").read_text() == "srun\n" and word:
                    continue
                if ours and there and word.encode() in (entry / "cmdline").read_bytes().replace(b"\0", b" "):
                    found.append(int(entry.name))
        return found

    def start_node(self, number: int) -> None:
        """Starts a node's slurmd."""
        self._command("slurmd", "-N", f"node{number}", where=f"node{number}")

    def kill_daemon(self, number: int) -> None:
        """A node's slurmd is gone; its steps live on."""
        daemon = _daemon(self.directory / f"slurmd.node{number}.pid")
        if daemon is None:
            raise RuntimeError(f"no slurmd on node{number}")
        os.kill(daemon, signal.SIGKILL)
        until(partial(_ended, daemon), 10)

    def kill_node(self, number: int) -> None:
        """The node is gone from one moment to the next: its slurmd, its steps and their processes."""
        node = f"node{number}"
        victims = [process for process in self.processes() if self._is_on(process, node)]
        daemon = _daemon(self.directory / f"slurmd.{node}.pid")
        for process in [daemon, *victims]:
            with contextlib.suppress(ProcessLookupError):
                if process is not None:
                    os.kill(process, signal.SIGKILL)

    def _is_on(self, process: int, node: str) -> bool:
        """Whether a process is the node's slurmstepd, or came of it."""
        with contextlib.suppress(OSError):
            if f"SLURMD_NODENAME={node}".encode() in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
                return True
            if self.separate and "slurmstepd" in Path(f"/proc/{process}/cmdline").read_text():
                holder = self._holders[node].pid
                return os.readlink(f"/proc/{process}/ns/net") == os.readlink(f"/proc/{holder}/ns/net")
        return False

    # Commands.

    def run(self, *arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        """A command where the cluster can be reached."""
        command = [*self.enter("login", options.get("cwd")), *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, env=self.environment(), timeout=60, check=False, **options
        )

    def state(self, job: str) -> str:
        """Of a job: PENDING, RUNNING, COMPLETED, ..."""
        found = re.findall(r"JobState=(\w+)", self.run("scontrol", "-o", "show", "job", job).stdout)
        return "/".join(sorted(set(found)))

    def restarts(self, job: str) -> int:
        """How often a job was requeued."""
        return int(re.findall(r"Restarts=(\d+)", self.run("scontrol", "-o", "show", "job", job).stdout)[0])

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in environment().items() if not name.startswith(("SLURM", "SBATCH"))}
        path = f"{Path(sys.executable).parent}:{_PATH}"
        return {**kept, "PATH": path, "SLURM_CONF": str(self._conf)}

    def enter(self, where: str, directory: Any = None) -> list[str]:
        if not self.separate:
            return []
        return ["nsenter", "-t", str(self._holders[where].pid), "-n", "-u", "-m", f"--wd={directory or Path.cwd()}"]

    def _command(self, *arguments: str, where: str = "login") -> None:
        log = (self.directory / "log" / f"{arguments[0]}-{where}.out").open("ab")
        with log:
            subprocess.run(
                [*self.enter(where, self.directory), *arguments],
                env=self.environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True, timeout=60,
            )  # fmt: skip

    def _munge(self) -> None:
        folder = self.directory / "munge"
        files = {"key-file": "key", "socket": "s", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self._here("munged", *(f"--{option}={folder / name}" for option, name in files.items()))

    def _here(self, *arguments: str | Path) -> None:
        subprocess.run(list(map(str, arguments)), env=self.environment(), capture_output=True, check=True, timeout=60)

    # What it is made of.

    def network(self) -> None:
        """A namespace for the login node, with a bridge, and one per node, each with a leg on it."""
        names = [f"node{number}" for number in range(1, self.nodes + 1)]
        host = socket.gethostname().partition(".")[0]
        lines = ["127.0.0.1 localhost", f"{_NETWORK}.254 {host} login"]
        lines += [f"{_NETWORK}.{number} {name}" for number, name in enumerate(names, start=1)]
        (self.directory / "hosts").write_text("\n".join(lines) + "\n")
        for name in ("login", *names):
            self._hold(name, host if name == "login" else name)
        login = self.enter("login")
        self._here(*login, "ip", "link", "add", "br0", "type", "bridge")
        self._here(*login, "ip", "addr", "add", f"{_NETWORK}.254/24", "dev", "br0")
        self._here(*login, "ip", "link", "set", "br0", "up")
        for number, name in enumerate(names, start=1):
            holder = str(self._holders[name].pid)
            self._here(*login, *f"ip link add v{number} type veth peer name eth0 netns {holder}".split())
            self._here(*login, *f"ip link set v{number} master br0 up".split())
            self._here(*self.enter(name), *f"ip addr add {_NETWORK}.{number}/24 dev eth0".split())
            self._here(*self.enter(name), *["ip", "link", "set", "eth0", "up"])

    def _hold(self, name: str, host: str) -> None:
        """A process that keeps a node's namespaces."""
        script = 'mount --bind "$1" /etc/hosts && hostname "$2" && ip link set lo up && echo up && exec sleep infinity'
        command = ["unshare", "-n", "-u", "-m", "bash", "-c", script, "bash", str(self.directory / "hosts"), host]
        holder = subprocess.Popen(command, env=self.environment(), stdout=subprocess.PIPE, start_new_session=True)
        self._holders[name] = holder
        if holder.stdout is None or holder.stdout.readline() != b"up\n":
            raise RuntimeError(f"no namespace for {name}")
        holder.stdout.close()

    def _configuration(self) -> str:
        host, user, folder = socket.gethostname().partition(".")[0], getpass.getuser(), self.directory
        port = _ports(self.nodes + 1)
        memory = int(Path("/proc/meminfo").read_text().split()[1]) // 1024 * 9 // 10
        settings = {
            "ClusterName": "tests",
            "SlurmctldHost": f"{host}({_NETWORK}.254)" if self.separate else f"{host}(127.0.0.1)",
            "SlurmUser": user,
            "SlurmdUser": user,
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={folder}/munge/s,cred_expire=10",  # a requeued job waits for its credential to expire
            "CredType": "cred/munge",
            "MpiDefault": "none",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "AccountingStorageType": "accounting_storage/none",
            "JobCompType": "jobcomp/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_CPU",
            "SchedulerType": "sched/backfill",
            "SchedulerParameters": "sched_interval=1,bf_interval=1,sched_min_interval=100000,batch_sched_delay=0",
            "SwitchType": "switch/none",
            "ReturnToService": 2,
            "MailProg": "/bin/true",
            "KillWait": 5,
            "SlurmdTimeout": 10,
            "MinJobAge": 3600,
            "PropagateResourceLimits": "NONE",
            "SlurmctldPort": port,
            "StateSaveLocation": f"{folder}/state",
            "SlurmdSpoolDir": f"{folder}/spool/%n",
            "SlurmctldPidFile": f"{folder}/slurmctld.pid",
            "SlurmdPidFile": f"{folder}/slurmd.%n.pid",
            "SlurmctldLogFile": f"{folder}/log/slurmctld.log",
            "SlurmdLogFile": f"{folder}/log/slurmd.%n.log",
            "SlurmdParameters": "config_overrides",
        }
        lines = [f"{key}={value}" for key, value in settings.items()]
        for number in range(1, self.nodes + 1):
            address = f"{_NETWORK}.{number}" if self.separate else "127.0.0.1"
            shared = "" if self.separate else f" NodeHostname={host}"
            lines.append(
                f"NodeName=node{number}{shared} NodeAddr={address} Port={port + number} CPUs={self.cpus} "
                f"RealMemory={memory}"
            )
        return "\n".join([*lines, "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP"]) + "\n"


def _ended(process: int) -> bool:
    """Whether it runs no more; a zombie has no command line."""
    try:
        return not Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return True


def _daemon(file: Path) -> int | None:
    """The process that a daemon's file names, if it is still that daemon."""
    try:
        process = int(file.read_text())
        line = Path(f"/proc/{process}/cmdline").read_text()
    except (OSError, ValueError):
        return None
    return process if any(name in line for name in DAEMONS) else None
