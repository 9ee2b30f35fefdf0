"""`deepspeed --hostfile ... launch/pretrain_gpt.sh` over two nodes: pdsh and ssh between network namespaces."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import slurm_cluster
from tests.helpers.commands import BIN, losses, mup
from tests.helpers.configs import pipeline_file
from tests.helpers.slurm_cluster import Cluster

TOOLS = ("sshd", "ssh", "ssh-keygen", "pdsh")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Cluster]:
    """Two nodes that run an sshd each, which lets this test's key in."""
    absent = [name for name in TOOLS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if absent or not slurm_cluster.namespaces():
        pytest.skip(f"needs {', '.join(absent) or 'network namespaces, which root may make'}")
    cluster = Cluster()
    daemons = []
    try:
        cluster.network()
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd's own, which a service manager would make
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
        options = {
            "HostKey": tmp_path / "host",
            "AuthorizedKeysFile": tmp_path / "user.pub",
            "StrictModes": "no",
            "UsePAM": "no",
            "PidFile": "none",
            "PermitRootLogin": "prohibit-password",
        }
        words = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
        for node in ("node1", "node2"):
            sshd = [*cluster.enter(node), "/usr/sbin/sshd", "-D", "-f", "/dev/null", *words]
            daemons.append(subprocess.Popen(sshd, stderr=subprocess.DEVNULL))
        yield cluster
    finally:
        for daemon in daemons:
            daemon.terminate()
            daemon.wait()
        cluster.stop()


@pytest.mark.slow
def test_deepspeed_over_two_nodes(nodes: Cluster, repository: Path, tmp_path: Path) -> None:
    """The literal command, on node1; TP 2 with a rank per node; the losses are those of two ranks of one machine."""
    keys = {"tuning__run": "never", "parallel__tensor_model_parallel_size": 2}
    (tmp_path / "one").mkdir()
    one = mup("train", pipeline_file(tmp_path / "one", **keys), "--nproc-per-node", "2")
    assert one.returncode == 0, one.stderr
    (tmp_path / "hostfile").write_text("node1 slots=1\nnode2 slots=1\n")
    (tmp_path / ".deepspeed_env").write_text(f"OMP_NUM_THREADS=1\nPATH={BIN}:/usr/bin:/bin\n")
    ssh = f"-i {tmp_path}/user -l {getpass.getuser()} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    command = [
        *nodes.enter("node1", tmp_path),
        *("env", f"PDSH_SSH_ARGS_APPEND={ssh} -o LogLevel=ERROR"),
        *(BIN / "deepspeed", "--hostfile", tmp_path / "hostfile", "--no_ssh_check", "--master_addr", "node1"),
        *(repository / "launch" / "pretrain_gpt.sh", pipeline_file(tmp_path, **keys)),
    ]
    result = subprocess.run(
        list(map(str, command)), env=nodes.environment(), capture_output=True, text=True, timeout=400, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "node2: " in result.stderr + result.stdout
    assert losses(tmp_path / "run") == losses(tmp_path / "one" / "run")
