"""What ``kvferry up`` says, and how its options change the topology."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from kvferry.cli.deployment import topology_options
from kvferry.cli.main import run
from kvferry.cli.up import describe
from kvferry.cluster.supervisor import Deployment, RunningInstance, RunningRouter
from kvferry.cluster.topology import Topology
from kvferry.errors import ConfigError
from kvferry.protocol.params import Role


def _topology_for(arguments: list[str]) -> Topology:
    seen: list[Topology] = []

    @click.command()
    @topology_options
    def command(*, topology: Topology, verbose: bool) -> None:
        assert verbose is False
        seen.append(topology)

    command.main(args=arguments, standalone_mode=False)
    return seen[0]


def test_no_options_give_the_default() -> None:
    assert _topology_for([]) == Topology()


def test_options_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "shape.toml"
    path.write_text('model = "a"\ndtype = "float32"\n[[prefill]]\ncount = 3\n[router]\nport = 5\n')
    topology = _topology_for(["--topology", str(path), "--model", "b", "--decode", "2"])
    assert (topology.model, topology.dtype, topology.router.port) == ("b", "float32", 5)
    assert (topology.prefill[0].count, topology.decode[0].count) == (3, 2)
    assert _topology_for(["--topology", str(path), "--port", "0"]).router.port == 0


def test_further_options_are_passed_on_behind_the_file_s(tmp_path: Path) -> None:
    path = tmp_path / "shape.toml"
    path.write_text(
        '[[prefill]]\narguments = ["-a"]\n[router]\narguments = ["-b"]\nmode = "pull"\n'
    )
    texts = ["--engine-arguments", "--ucx-tls 'tcp,self'", "--router-arguments", "--port 1"]
    topology = _topology_for(["--topology", str(path), *texts])
    assert topology.prefill[0].arguments == ("-a", "--ucx-tls", "tcp,self")
    assert topology.decode[0].arguments == ("--ucx-tls", "tcp,self")
    assert topology.router.arguments == ("-b", "--port", "1")
    assert topology.router.mode == "pull"


def test_text_that_is_no_options_is_refused() -> None:
    with pytest.raises(click.UsageError, match="--engine-arguments"):
        _topology_for(["--engine-arguments", "'unclosed"])


def test_up_starts_the_router_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Topology] = []

    def start(topology: Topology, *_: object, **__: object) -> None:
        started.append(topology)

    monkeypatch.setattr("kvferry.cli.up.with_deployment", start)
    monkeypatch.setattr("kvferry.cli.up.run_to_end", lambda work: None)
    assert run(["up", "--mode", "push", "--decode-choice", "late"]) == 0
    assert run(["up"]) == 0
    assert [(t.router.mode, t.router.decode_choice) for t in started] == [
        ("push", "late"),
        (None, None),
    ]


def test_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the topology file .*none\.toml"):
        _topology_for(["--topology", str(tmp_path / "none.toml")])


def test_description_names_every_url_and_a_command_to_try() -> None:
    instance = RunningInstance(
        name="prefill-0",
        role=Role.PREFILL,
        url="http://127.0.0.1:1111",
        pid=1,
        control_address="",
        cores=(),
    )
    shown = describe(
        Deployment(
            router_url="http://127.0.0.1:2222",
            router_pid=2,
            instances=(instance,),
            further_routers=(RunningRouter(name="router-1", url="http://127.0.0.1:3", pid=3),),
        )
    )
    assert "prefill-0  http://127.0.0.1:1111" in shown
    assert "router     http://127.0.0.1:2222" in shown
    assert "router-1   http://127.0.0.1:3" in shown
    assert "curl -N http://127.0.0.1:2222/v1/chat/completions" in shown
