"""Policies of the simulated cluster, and the checker of its logs."""

import json
from copy import deepcopy

import pytest
from benchmarks import cluster
from benchmarks.scheduling import jobs as tables
from benchmarks.scheduling.checker import completions
from benchmarks.scheduling.jobs import Job, read_workload
from benchmarks.scheduling.policies import POLICIES, elastic_srtf
from benchmarks.scheduling.simulation import Cluster, place

PAUSE = 5.0
GPUS = 32


@pytest.fixture(scope="module")
def simulated():
    """Some jobs, and the log of a policy that resizes them, from JSON."""
    jobs = read_workload(1, GPUS)[:20]
    log = Cluster(GPUS, elastic_srtf, PAUSE).run(jobs)
    return jobs, json.loads(json.dumps(log))


def resize(log):
    """The first stop of a job that starts again."""
    starts = [entry["job"] for entry in log if entry["event"] == "start"]
    return next(
        entry
        for entry in log
        if entry["event"] == "stop" and starts.count(entry["job"]) > 1
    )


def add(entry, key, value):
    entry[key] += value


def replace_gpu(entry, gpu):
    entry["gpus"] = [*entry["gpus"][:-1], gpu]


MUTATIONS = {
    "step dropped": (lambda log: add(resize(log), "steps", -1), "too few"),
    "step added": (lambda log: add(resize(log), "steps", 1), "too many"),
    "end dropped": (lambda log: log.pop(), "not complete"),
    "end early": (lambda log: add(log[-1], "time", -60.0), "too many"),
    "end late": (lambda log: add(log[-1], "time", 1.0), "too few"),
    "end twice": (lambda log: log.append(log[-1]), "has no GPUs"),
    "start early": (lambda log: add(log[0], "time", -1.0), "not arrived"),
    "start twice": (lambda log: log.insert(1, log[0]), "has GPUs"),
    "rate": (lambda log: add(log[0], "step_seconds", -0.01), "wrong rate"),
    "order": (lambda log: log.insert(0, log.pop(1)), "earlier event"),
    "overlap": (
        lambda log: replace_gpu(log[1], log[0]["gpus"][0]),
        "not free",
    ),
    "GPU twice": (
        lambda log: replace_gpu(log[0], log[0]["gpus"][0]),
        "not free",
    ),
    "GPU missing": (lambda log: replace_gpu(log[0], GPUS), "not free"),
    "other GPU": (lambda log: replace_gpu(resize(log), 0), "other GPUs"),
    "odd number": (lambda log: log[0]["gpus"].pop(), "wrong number"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutated_log_is_rejected(simulated, mutation):
    jobs, log = simulated
    assert completions(log, jobs, GPUS, PAUSE).keys() == {j.name for j in jobs}
    mutated = deepcopy(log)
    mutate, message = MUTATIONS[mutation]
    mutate(mutated)
    with pytest.raises(ValueError, match=message):
        completions(mutated, jobs, GPUS, PAUSE)


def test_log_with_free_resizes_is_rejected(simulated):
    jobs, _ = simulated
    log = Cluster(GPUS, elastic_srtf, 0.0).run(jobs)
    with pytest.raises(ValueError, match="too many steps"):
        completions(log, jobs, GPUS, PAUSE)


ENDS = {
    # C fits next to B, but waits behind it.
    "gang FIFO": {"A": 10, "B": 13, "C": 14},
    # C is more important than B.
    "gang priority": {"A": 10, "C": 11, "B": 14},
    # B stops A at 1, C stops B at 2; they go on at 3 and 10.
    "gang SRTF": {"A": 24, "B": 10, "C": 3},
    # A and B have two GPUs each, and B one while C runs; A has four at last.
    "fair shares": {"A": 24, "B": 14, "C": 3},
    # B stops A at 1; at 2 B keeps two GPUs, A gets one and C one.
    "elastic SRTF": {"A": 24, "B": 11, "C": 3},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_policy_decides_as_by_hand(monkeypatch, policy):
    monkeypatch.setattr(
        tables, "step_seconds", lambda _, batch, gpus, nodes: batch / gpus
    )
    jobs = [
        Job("A", 0.0, "", gpus=4, batch=4, steps=10, weight=1),
        Job("B", 1.0, "", gpus=4, batch=4, steps=3, weight=1),
        Job("C", 2.0, "", gpus=1, batch=1, steps=1, weight=10),
    ]
    log = Cluster(4, POLICIES[policy], PAUSE).run(jobs)
    ends = completions(log, jobs, 4, PAUSE)
    assert ends == pytest.approx(ENDS[policy])


def test_step_time_is_linear_between_measurements():
    def seconds(application, batch, *placement):
        job = Job("", 0.0, application, gpus=16, batch=batch, steps=1)
        return job.step_seconds(*placement)

    # Rows of step_times.csv: one; two of samples; two each of samples, nodes.
    assert seconds("imagenet", 16 * 81, 16) == pytest.approx(0.532906)
    four, six = (0.532906 + 0.61291) / 2, (0.528795 + 0.618503) / 2
    assert seconds("imagenet", 16 * 98, 16) == pytest.approx(four)
    five = (four + six) / 2
    assert seconds("imagenet", 16 * 98, 16, 5) == pytest.approx(five)
    # Eight parts of 80 samples, of which only the last synchronises.
    parts = 8 * 2.54062 - 7 * 0.00153697
    assert seconds("deepspeech2", 640, 1) == pytest.approx(parts)


def test_workload_is_that_of_the_trace():
    jobs = read_workload(1, 64)
    assert len(jobs) == 160
    assert jobs[0] == Job("cifar10-0", 107, "cifar10", 6, 2048, 3178, 1)
    assert max(job.gpus for job in jobs) == 32
    assert max(job.gpus for job in read_workload(1, 16)) == 16
    assert jobs == read_workload(1, 64) != read_workload(1, 64, seed=1)


@pytest.mark.parametrize(
    ("size", "gpus"),
    [(1, [8]), (2, [0, 1]), (4, [4, 5, 6, 7]), (6, [4, 5, 6, 7, 0, 1])],
)
def test_gpus_are_on_few_nodes(size, gpus):
    assert place({0, 1, 4, 5, 6, 7, 8}, size) == gpus


def test_command_compares_all_policies(tmp_path):
    path = tmp_path / "cluster.json"
    assert cluster.main(["--quick", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["settings"]["resize_seconds"] == 30.0
    rows = {row["policy"]: row for row in report["rows"]}
    assert rows.keys() == POLICIES.keys()
    for ratio in report["ratios"]:
        values = (rows[ratio[key]] for key in ("policy", "baseline"))
        one, other = (row[ratio["figure"]] for row in values)
        assert ratio["ratio"] == pytest.approx(one / other)
