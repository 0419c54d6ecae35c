"""Which host a role runs on, what a job on several hosts may ask for, and what follows when one is lost."""

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from paceline.causes import Cause, ProcessEnd
from paceline.control import Controller, RunDirectory
from paceline.control.host_choice import HostChoice, LocalPlace
from paceline.core.run_decisions import Launch
from paceline.core.run_machine import RunMachine
from paceline.engines import LOCAL_HOST, Exited
from paceline.exceptions import RoleFailed, UsageError
from paceline.plan import Job, make_plan
from paceline.plan.host_settings import host_silence_s
from paceline.testing import PaperEngine

LISTEN = "10.0.0.1:7711"


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").touch()
    return str(tmp_path / "train.py")


def job(script: str, /, **settings: Any) -> Job:
    return Job(**{"script": script, "hosts": 3, "listen": LISTEN, "workers": 5, "servers": 3, **settings})


def placed(job: Job) -> dict[str, str]:
    return {role.name: role.host for role in make_plan(job).roles}


def test_ranks_are_dealt_out_in_turn_and_the_lead_is_here(script: str) -> None:
    found = placed(job(script))
    assert [found[f"worker:{rank}"] for rank in range(5)] == [
        *(LOCAL_HOST, "host-1", "host-2", LOCAL_HOST, "host-1"),
    ]
    assert [found[f"server:{rank}"] for rank in range(3)] == [LOCAL_HOST, "host-1", "host-2"]
    blocks = placed(job(script, placement="blocks", workers=7, servers=2))
    assert [blocks[f"worker:{rank}"] for rank in range(7)] == [
        *(LOCAL_HOST, LOCAL_HOST, LOCAL_HOST, "host-1", "host-1", "host-2", "host-2"),
    ]
    assert blocks["server:0"] == LOCAL_HOST


def test_roles_stay_where_they_were_and_move_when_their_host_is_gone(script: str) -> None:
    choice = HostChoice(make_plan(job(script)))
    everywhere = [LOCAL_HOST, "host-1", "host-2"]
    assert choice.choose("worker", 1, everywhere) == "host-1"
    assert choice.local_place(1, 5) == LocalPlace(0, 2, 1)
    assert choice.local_place(4, 5) == LocalPlace(1, 2, 1)
    left = [LOCAL_HOST, "host-2"]
    assert choice.choose("worker", 1, left) == "host-2"  # it has fewer
    assert choice.choose("worker", 4, left) == LOCAL_HOST
    assert choice.choose("worker", 1, everywhere) == "host-2"  # it does not move back
    assert choice.local_place(4, 5) == LocalPlace(2, 3, 0)
    assert choice.choose("worker", 5, [*left, "host-3"]) == "host-3"  # scaled: where there are the fewest
    assert choice.local_place(5, 6) == LocalPlace(0, 1, 3)
    assert [choice.num_workers(host) for host in (LOCAL_HOST, "host-1", "host-2")] == [3, 0, 2]


def test_on_one_host_local_ranks_are_ranks(script: str) -> None:
    choice = HostChoice(make_plan(job(script, hosts=1, listen=None)))
    assert choice.choose("worker", 3, [LOCAL_HOST]) == LOCAL_HOST
    assert choice.local_place(3, 5) == LocalPlace(3, 5, 0)
    assert choice.choose("worker", 7, [LOCAL_HOST]) == LOCAL_HOST
    assert choice.local_place(7, 8) == LocalPlace(7, 8, 0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"listen": None}, "say where the other hosts join, as in --listen"),
        ({"hosts": 1}, "give --hosts N, or leave it out"),
        ({"listen": "7711"}, "not of the form HOST:PORT"),
        ({"listen": "a:99999"}, "not of the form HOST:PORT"),
        ({"hosts": 9}, "some hosts would have nothing to do"),
        ({"link": "shm"}, "link=shm shares memory"),
        ({"replicas": 1}, "a server on another host cannot take the lead"),
        ({"server_device": "cuda"}, "server_device=cuda shares a GPU's memory"),
        ({"script": None}, "other hosts do not have: use a script"),
        ({"placement": "best"}, "placement='best'"),
        ({"mode": "allreduce"}, "gloo"),
        ({"mode": "hybrid:asp", "groups": 3}, "gloo"),
        ({"mode": "hogwild"}, "share one memory"),
        ({"schedule": ("10=asp",), "mode": "bsp", "replicas": 0, "link": "shm"}, "link=shm"),
    ],
)
def test_what_does_not_work_on_several_hosts_is_refused_by_name(
    script: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        make_plan(job(script, **settings))


def test_links_between_hosts_are_encrypted_and_one_setting_says_when_a_host_is_lost(script: str) -> None:
    assert job(script).tls
    assert [host_silence_s(deadline_s) for deadline_s in (10, 60, 300, 10_000)] == [2, 4, 20, 60]
    plan = make_plan(job(script))
    assert not plan.one_host and not plan.in_place and not plan.warnings
    assert type(plan).from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_lost_host_is_a_cause_that_may_pass() -> None:
    machine = RunMachine(servers=1, workers=2, max_restarts=3)
    machine.begin()
    machine.server_ready(0)
    lost = ProcessEnd(Cause.LOST_HOST, "was lost with its host b (its agent said nothing for 15 s)")
    decisions = machine.exited("worker", 1, 0, lost)
    assert Launch("worker", 1, 1) in decisions


def test_roles_of_a_lost_host_start_again_on_the_others(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))
    wanted = dataclasses.replace(job(script, workers=3, servers=1), spans=False)
    plan = make_plan(wanted)
    run = RunDirectory.create(wanted, plan=plan)
    engine = PaperEngine(hosts=["host-1", "host-2"])
    lost: list[str] = []

    def watch(status: Any, pieces: Any) -> None:
        if len(engine.started) == 4 and not lost:
            lost.append("host-1")
            engine.lose("host-1")
        elif lost and len(engine.started) == 5:
            engine.agent(LOCAL_HOST).report(Exited.of("server", 0, 0, 1, None))

    controller = Controller(plan, engine, run, watch=watch)
    with pytest.raises(RoleFailed, match="server:0"):
        controller.run()
    asked = {host: engine.agent(host).specs for host in (LOCAL_HOST, "host-1", "host-2")}
    assert [(spec.name, spec.incarnation) for spec in asked["host-1"]] == [("worker:1", 0)]
    again = [(host, spec) for host, specs in asked.items() for spec in specs if spec.incarnation]
    ((host, spec),) = again
    assert spec.name == "worker:1" and host in (LOCAL_HOST, "host-2")
    assert spec.config["local_rank"] == 1 and spec.config["local_workers"] == 2
    messages = "\n".join(controller.status.messages)
    assert "host host-1 () is lost: its agent went silent" in messages.replace("None", "")
    assert [host.lost for host in controller.status.hosts] == ["", "its agent went silent", ""]
    assert controller.status.workers[1].host == host and engine.closed


def test_an_exit_says_how_the_process_ended() -> None:
    assert Exited.of("worker", 0, 0, 3, None).end == ProcessEnd(Cause.EXITED, "exited with code 3")
    killed = Exited.of("worker", 0, 0, None, signal.SIGSEGV)
    assert killed.cause is Cause.CRASHED and "SIGSEGV" in killed.how and killed.hint
