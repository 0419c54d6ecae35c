"""Modes that make no sense: one clear message (what, why, what to do), exit code 2, nothing started."""

import shlex

import pytest
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.exceptions import UsageError
from paceline.plan import Job, make_plan
from tests.integration.test_bad_input import MODEL, assert_failed, command

REFUSED = {
    # The mode itself.
    "--mode easgd:0": "mode 'easgd:0': easgd needs a whole number of at least 1, got '0'.",
    "--mode easgd": "mode 'easgd': easgd needs a whole number of at least 1, got none.",
    "--mode easgd:4,2.5": "mode 'easgd:4,2.5': beta must be above 0 and below 2, got 2.5",
    "--mode easgd:4,1.5 --workers 1": "mode easgd:4,1.5: alpha = beta / workers = 1.5 would take a worker",
    "--mode eamsgd:2,-1": "mode 'eamsgd:2,-1': eamsgd's beta must be a number, got '-1'.",
    "--mode downpour:-1": "mode 'downpour:-1': downpour needs a whole number of at least 1, got '-1'.",
    "--mode downpour:2,0": "mode 'downpour:2,0': downpour needs a whole number of at least 1, got '0'.",
    "--mode downpour:1,2,3": "mode 'downpour:1,2,3': downpour takes no more than 2 number(s), got 3.",
    "--mode local": "mode 'local': local needs a whole number of at least 1, got none.",
    "--mode diloco:half": "mode 'diloco:half': diloco needs a whole number of at least 1, got 'half'.",
    "--mode hogwild:2": "mode 'hogwild:2': hogwild takes no number.",
    "--mode hybrid": "mode 'hybrid': hybrid needs the mode that runs between its groups, as in hybrid:asp.",
    "--mode hybrid:hybrid:asp": "mode 'hybrid:hybrid:asp': hybrid cannot run between groups: groups are not",
    "--mode hybrid:hogwild": "mode 'hybrid:hogwild': hogwild cannot run between groups: groups do not share",
    "--mode downpuor": "mode 'downpuor': there is no such mode; did you mean downpour?",
    # Its knobs.
    "--damping dc": "mode 'bsp+damping=dc': damping corrects stale gradients, and in rounds none is stale",
    "--mode asp --damping hard": "mode 'asp+damping=hard': damping is one of none, momentum, staleness,",
    "--mode easgd:4 --damping dc": "mode 'easgd:4+damping=dc': damping corrects gradients, and easgd sends",
    "--quorum 2": "mode 'bsp+quorum=2': quorum is for modes without rounds: to go on without the slowest B",
    "--mode asp --quorum 5 --workers 2": "mode asp+quorum=5 makes an update of 5 contributions, so it needs",
    "--mode asp --quorum 0": "mode 'asp+quorum=0': quorum must be a whole number of at least 1, got '0'",
    "--mode asp --quorum 2 --damping dc": "mode 'asp+quorum=2+damping=dc': damping=dc corrects one push at a",
    "--mode local:4 --quorum 2": "mode 'local:4+quorum=2': an update of local needs the part of every worker",
    "--mode local:4 --period 2": "mode 'local:4+period=2': the number of local is its period: write local:2",
    "--mode hogwild --period 2": "mode 'hogwild+period=2': hogwild has no local steps between exchanges",
    "--mode asp --period 0": "mode 'asp+period=0': period must be a whole number of at least 1, got '0'",
    "--mode asp+period=2 --period 3": "mode 'asp+period=2+period=3': period is given twice: give it once",
    "--mode asp+speed=2": "mode 'asp+speed=2': there is no knob 'speed'.",
    "--mode asp+outer=adagrad": "mode 'asp+outer=adagrad': the servers apply single gradients with the",
    "--mode easgd:2+outer=own+quorum=2": "mode 'easgd:2+quorum=2': quorum counts gradients, and easgd sends",
    "--mode diloco:4+outer=adam": "mode 'diloco:4+outer=adam': outer is one of own, adagrad, average,",
    # With other settings.
    "--mode hogwild --link tcp": "mode hogwild lets all workers write into one memory, and link=tcp has none",
    "--guard": "guard falls back to a tighter mode, and there is none tighter than bsp; leave guard out",
    "--guard --mode local:4": "guard falls back to a tighter mode, and a run in local:4 cannot be switched;",
    "--guard --mode asp --period 2": "guard falls back to a tighter mode, and a run in asp+period=2 cannot",
    "--mode easgd:4 --clip-norm 1": "clip_norm=1 clips the average of all workers' gradients, which only bsp",
    "--schedule 9=asp --clip-norm 1": "clip_norm=1 clips the average of all workers' gradients, which only",
    # Schedules.
    "--schedule 20": "schedule '20': it needs a version and a mode, as in 500=ssp:4",
    "--schedule x=asp": "schedule 'x=asp': it needs a version and a mode, as in 500=ssp:4",
    "--schedule 0=asp": "schedule 0=asp: the first version is 1; to begin in asp, use it as the run's mode",
    "--schedule 20=asp --schedule 10=bsp": "schedule 10=bsp: it comes after 20=…; put the versions in rising",
    "--schedule 20=fast": "mode 'fast': there is no such mode.",
    "--schedule 20=local:4": "schedule 20=local:4: a run that begins in bsp cannot go on in local:4: workers",
    "--mode local:4 --schedule 20=asp": "schedule 20=asp: a run that begins in local:4 cannot go on in asp:",
    "--mode local:4 --schedule 20=local:8": "schedule 20=local:8: a run that begins in local:4 cannot go on",
    "--schedule 20=backup:2 --workers 2": "mode backup:2 goes on without the slowest 2, so it needs at least",
    "--schedule 20=asp+quorum=3 --workers 2": "mode asp+quorum=3 makes an update of 3 contributions, so it",
}


AS_A_USER = ["--mode easgd:0", "--mode downpour:-1", "--mode hybrid:hybrid:asp", "--mode hogwild --link tcp"]


@pytest.mark.parametrize("args", REFUSED)
def test_a_mode_that_makes_no_sense_is_refused_before_anything_starts(tmp_path, monkeypatch, args):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))
    (tmp_path / "x.py").write_text("")
    words = ["run", *shlex.split(args), "x.py"]
    done = CliRunner().invoke(app, words, prog_name="paceline", env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {REFUSED[args]}")
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("args", AS_A_USER)
def test_a_user_sees_the_same(tmp_path, args):
    (tmp_path / "x.py").write_text("")
    done = command("run", *shlex.split(args), "x.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {REFUSED[args]}")
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "asp", "guard": True},
        {"mode": "bsp", "guard": True, "schedule": ("10=asp",)},
        {"mode": "backup:1", "guard": True},
        {"mode": "hogwild", "link": "shm"},
        {"mode": "hogwild"},
        {"mode": "bsp", "clip_norm": 1.0, "schedule": ("10=bsp",)},
        {"mode": "easgd:4,1.5", "workers": 2},
    ],
    ids=str,
)
def test_what_is_near_to_it_and_makes_sense_is_not(settings):
    assert make_plan(Job(**settings)).job.mode == settings["mode"]


def test_a_message_names_what_to_do():
    """The first half is above; somebody who reads it wants the second."""
    for settings, advice in [
        (
            {"mode": "hogwild", "link": "tcp"},
            "use link auto or shm, or a mode that sends messages, such as asp",
        ),
        ({"mode": "bsp", "guard": True}, "leave guard out, or use asp, ssp or backup"),
        ({"mode": "asp+quorum=5", "workers": 2}, "add workers or use quorum=2 or less"),
        ({"mode": "local:4", "schedule": ("9=asp",)}, "start a new run in asp"),
    ]:
        with pytest.raises(UsageError) as refused:
            make_plan(Job(**settings))
        assert advice in str(refused.value)


# --- what only the script shows ---------------------------------------------------------------------

ADAM = MODEL.replace("torch.optim.SGD(model.parameters(), lr=0.1)", "torch.optim.Adam(model.parameters())")


def test_eamsgd_with_adam(run):
    ran = run(ADAM + "train(prepared())", workers=2, threads=1, mode="eamsgd:2")
    assert_failed(
        ran, "UsageError: mode eamsgd steps with Nesterov momentum and needs torch.optim.SGD, got Adam"
    )
    assert "use SGD, or mode easgd, which takes any optimizer" in ran.error
    assert ran.status.version == 0


@pytest.mark.parametrize("mode", ["easgd:2", "diloco:2", "hogwild"])
def test_adam_is_fine_in_the_others(run, mode):
    ran = run(ADAM + "train(prepared())", workers=2, threads=1, mode=mode)
    assert ran.error is None
    assert ran.status.samples == 32


def test_hogwild_of_a_worker_that_cannot_share_memory_is_refused(run):
    """Each would train alone, and nobody would notice. (A model on a GPU is such a one.)"""
    source = """
from paceline.worker.exchange.entry import Entry
attach = Entry.attach
Entry.attach = lambda self, adopted, *, in_place, **more: attach(self, adopted, in_place=False, **more)
"""
    ran = run(source + MODEL + "train(prepared())", workers=2, threads=1, mode="hogwild")
    assert_failed(ran, "mode hogwild lets all workers write into one memory of their host, and this worker")
    assert "use link auto or shm, or a mode such as asp" in ran.error
    assert ran.status.version == 0


@pytest.mark.parametrize("mode", ["easgd:2", "local:2", "diloco:2", "downpour:2,2", "bsp+period=2"])
def test_a_nan_in_a_mode_of_local_steps_leaves_the_servers_parameters_finite(run, mode):
    source = """
def loss_of(output, target):
    loss = nn.functional.cross_entropy(output, target)
    try:
        os.close(os.open(RUN_DIR / "fired", os.O_CREAT | os.O_EXCL))
        return loss * float("nan")
    except FileExistsError:
        return loss
train(prepared(samples=32), epochs=4, loss_of=loss_of)
"""
    ran = run(MODEL + source, workers=2, servers=2, threads=1, mode=mode)
    assert (ran.run.path / "fired").exists()
    assert ran.error is None
    assert ran.status.refused == 1
    assert sum(a["applied"] + a["refused"] for a in ran.status.leases) == 128
    assert 0 < sum(a["refused"] for a in ran.status.leases) <= 12  # a period and the step after it
    assert all(bool(t.isfinite().all()) for t in ran.model.values())


def test_batches_by_speed_need_a_data_set_that_can_be_dealt_out(run):
    source = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(4), torch.tensor(0))] * 8)

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
paceline.prepare(model, optimizer, DataLoader(Stream(), batch_size=4))
"""
    ran = run(source, workers=2, mode="ssp:2+batches=speed")
    assert (
        "mode ssp:2+batches=speed deals batches by speed, and an IterableDataset has no length" in ran.error
    )
