"""Real vLLM servers as processes that a test starts, asks, stops and kills."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvferry.client.metrics_text import metric_total
from kvferry.cluster.leftovers import shared_memory_of
from kvferry.cluster.vllm_process import NO_BUSY_WAIT_FOLDER, kill_session, session_members
from kvferry.protocol.params import PeerAddress
from tests.support.process_forks import ForkedProcess, ProcessForks
from tests.vllm.asking import ask_instance

ROOT = Path(__file__).parents[2]
READY_S = 240.0
STOP_S = 30.0
IDLE_S = 10.0
_OF_RANKS = "-cpushm_"
"""What vLLM's tensor-parallel workers share on a CPU; vLLM itself leaves it behind."""


def environment_folder() -> Path:
    """Return the virtual environment with vLLM; ``KVFERRY_VLLM_ENV`` names another."""
    return Path(os.environ.get("KVFERRY_VLLM_ENV", ROOT / ".venv-vllm"))


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def free_ports(count: int) -> int:
    """Return the first of ``count`` ports in a row that nobody listens on now."""
    while True:
        first = free_port()
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


@dataclasses.dataclass(slots=True)
class VllmServer:
    """One ``vllm serve``. ``control_port`` is 0 for one without the plugin."""

    name: str
    forks: ProcessForks
    port: int
    control_port: int
    log_path: Path
    command: list[str]
    """After ``vllm``."""
    core: int
    num_ranks: int = 1
    process: ForkedProcess = dataclasses.field(init=False)

    def begin(self) -> None:
        """Start it, or start it again: on the same ports, as another process."""
        self.process = self.forks.start(
            self.command, self.log_path, _cores(self.core, self.num_ranks)
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def peer(self) -> PeerAddress:
        """Ask the control port who answers there, as a router would."""
        info = ask_instance(self.control_port)
        return PeerAddress(info.instance_id, info.epoch, info.control_address)

    def wait_ready(self) -> None:
        deadline_s = time.monotonic() + READY_S
        while not self._is_healthy():
            assert self.process.is_alive, self.log()
            assert time.monotonic() < deadline_s, self.log()
            time.sleep(0.2)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")[-8000:]

    def members(self) -> list[int]:
        """Return the process ids of the server and all that it has started, youngest last.

        By session, so that one whose parent has ended is found too.
        """
        return sorted(session_members(self.process.pid))

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all of the server's processes."""
        if number is signal.SIGKILL:
            kill_session(self.process.pid, trackers_too=False)
            return
        for pid in reversed(self.members()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """End all of the server's processes at once."""
        shared = self._shared_memory()
        self.send(signal.SIGKILL)
        assert self.process.wait(STOP_S)
        left = self._wait_gone(shared)
        for path in left:
            path.unlink(missing_ok=True)  # Nobody was left to do so.

    def stop(self) -> None:
        """End the server, by force where it takes too long. Nothing of it may be left."""
        shared = self._shared_memory()
        self.process.send(signal.SIGTERM)
        self.process.wait(STOP_S)
        self.send(signal.SIGKILL)
        assert self.process.wait(STOP_S)
        left = self._wait_gone(shared)
        for path in [path for path in left if _OF_RANKS in path.name]:
            path.unlink()
            left.remove(path)
        assert not left, f"{self.name} left {left}"
        assert not self.members(), f"{self.name} left processes"

    def _shared_memory(self) -> set[Path]:
        """Return the files in /dev/shm that the server's processes have mapped."""
        return {path for pid in self.members() for path in shared_memory_of(pid)}

    def _wait_gone(self, shared: set[Path]) -> set[Path]:
        """Wait for the last process; return what is left of ``shared``."""
        deadline_s = time.monotonic() + STOP_S
        while self.members() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return {path for path in shared if path.exists()}

    def cpu_s(self) -> float:
        """Return the processor time that the server's processes have taken."""
        ticks = 0
        for pid in self.members():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def metric(self, name: str) -> float:
        """Return the sum of a metric that must be there."""
        total = metric_total(self._metrics_text(), name)
        assert total is not None, f"{self.name} tells no {name}"
        return total

    def figure(self, name: str, **labels: str) -> float:
        """Return the sum of a metric over all its labels but the given ones."""
        return metric_total(self._metrics_text(), name, **labels) or 0.0

    def _metrics_text(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            content: bytes = answer.read()
            return content.decode()

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def start(
    forks: ProcessForks,
    name: str,
    model: Path,
    folder: Path,
    *arguments: str,
    core: int = 0,
    num_ranks: int = 1,
    extra_config: Mapping[str, object] | None = None,
) -> VllmServer:
    """Start a server on one core for each rank; with ``extra_config`` it has the plugin."""
    port, control_port = free_port(), 0
    command = [
        "serve", str(model),
        "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m",
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "4096",
        "--max-num-seqs", "16", "--tensor-parallel-size", str(num_ranks), *arguments,
    ]  # fmt: skip
    if extra_config is not None:
        control_port = free_ports(num_ranks)
        command += ["--kv-transfer-config", _transfer_config(control_port, extra_config)]
    server = VllmServer(
        name, forks, port, control_port, folder / f"{name}.log", command, core, num_ranks
    )
    server.begin()
    return server


@contextlib.contextmanager
def running(*servers: VllmServer) -> Iterator[tuple[VllmServer, ...]]:
    """Wait for ``servers``, and end them afterwards."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
        for server in servers:
            server.wait_ready()
        yield servers


def idle_share(*servers: VllmServer) -> float:
    """Return the share of a core that the busiest of idle ``servers`` takes."""
    before_s = [server.cpu_s() for server in servers]
    time.sleep(IDLE_S)
    took_s = (server.cpu_s() - b for server, b in zip(servers, before_s, strict=True))
    return max(took_s) / IDLE_S


def _transfer_config(control_port: int, extra_config: Mapping[str, object]) -> str:
    return json.dumps(
        {
            "kv_connector": "FerryConnector",
            "kv_connector_module_path": "kvferry.vllm_plugin",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"control_port": control_port, **extra_config},
        }
    )


def start_forks(folder: Path) -> ProcessForks:
    """Import vLLM in a process that servers are forked from.

    Their sockets and temporary files go into ``folder``: vLLM leaves most of them behind.
    """
    python = environment_folder() / "bin" / "python"
    environment = _environment() | {"TMPDIR": str(folder)}
    return ProcessForks(environment, (str(python), "-m", "tests.vllm.warm_vllm"))


def _cores(core: int, num_ranks: int) -> dict[str, str]:
    num_cores = os.cpu_count() or 1
    cores = [str((core + rank) % num_cores) for rank in range(num_ranks)]
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(cores)}


def _environment() -> dict[str, str]:
    return {
        # The sources that are tested, whatever the environment has installed.
        "PYTHONPATH": os.pathsep.join((str(NO_BUSY_WAIT_FOLDER), str(ROOT / "src"))),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
