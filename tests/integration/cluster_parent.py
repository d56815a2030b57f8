"""Starts a deployment of fake programs, prints its process ids and waits to be killed."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from kvferry.cluster.supervisor import Supervisor, SupervisorConfig
from kvferry.cluster.topology import Topology


async def _run(folder: Path) -> None:
    program = (sys.executable, str(Path(__file__).with_name("fake_program.py")))
    config = SupervisorConfig(program=program)
    async with Supervisor(Topology(), folder, config=config) as supervisor:
        deployment = await supervisor.start()
        pids = [deployment.router_pid, *(item.pid for item in deployment.instances)]
        sys.stdout.write(json.dumps(pids) + "\n")
        sys.stdout.flush()
        await supervisor.watch()


if __name__ == "__main__":
    asyncio.run(_run(Path(sys.argv[1])))
