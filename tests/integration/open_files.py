"""What a process has open: descriptors, sockets, threads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_STALE_DESCRIPTORS = 8
"""Of links whose peers have died: Python closes some of them when it next collects garbage."""
MAX_SPARE_SOCKETS = 8


@dataclass(frozen=True, slots=True)
class Resources:
    """What a process has open, but for HTTP connections, of which a burst leaves many for a while:
    probes that go round among them keep them from growing old."""

    pid: int
    num_sockets: int
    num_http_sockets: int
    num_other_descriptors: int
    num_threads: int

    @classmethod
    def of(cls, pid: int, http_ports: Collection[int]) -> Resources:
        """``http_ports`` are those of all servers: a connection to one of them is an HTTP one."""
        folder = Path(f"/proc/{pid}")
        targets = []
        for link in (folder / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                targets.append(os.readlink(link))
        http = {f"socket:[{inode}]" for inode in _http_inodes(folder, http_ports)}
        num_sockets = sum(target.startswith("socket:") for target in targets)
        num_http = sum(target in http for target in targets)
        num_threads = len(list((folder / "task").iterdir()))
        return cls(pid, num_sockets - num_http, num_http, len(targets) - num_sockets, num_threads)

    def has_grown(self, then: Resources, max_http_sockets: int) -> bool:
        """Whether there is more than ``then``, or more HTTP connections than may be kept."""
        return self.pid == then.pid and (
            self.num_sockets > then.num_sockets + MAX_SPARE_SOCKETS
            or self.num_http_sockets > max_http_sockets
            or self.num_other_descriptors > then.num_other_descriptors + MAX_STALE_DESCRIPTORS
            or self.num_threads > then.num_threads
        )


def _http_inodes(folder: Path, http_ports: Collection[int]) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        for line in (folder / "net" / table).read_text().splitlines()[1:]:
            _, local, remote, *rest = line.split()
            ports = {int(address.rpartition(":")[2], 16) for address in (local, remote)}
            if not ports.isdisjoint(http_ports):
                yield rest[6]
