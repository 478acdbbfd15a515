"""Scheduled iterations of the simulated cluster, and their checker."""

import json
from dataclasses import dataclass, replace
from math import lcm
from statistics import fmean

import pytest
from benchmarks import cluster
from benchmarks.scheduling.iteration_checker import iteration_ends
from benchmarks.scheduling.iterations import (
    Costs,
    Iterations,
    NodeJob,
    Task,
    least_advanced_first,
    least_work_first,
)
from benchmarks.scheduling.jobs import Job, read_workload
from benchmarks.scheduling.trace import read_trace

GPUS = 8
COSTS = Costs(switch=0.5, load=1.0)
HEADER = "job_id,num_gpu,submit_time,iterations,model_name,duration\n"


@dataclass(frozen=True)
class FixedJob(Job):
    """A job that takes ``batch`` seconds a step, and 0.5 to synchronise."""

    memory: float = 0.0

    def step_seconds(self, gpus, nodes=0):
        return self.batch + self.sync_seconds(nodes)

    def sync_seconds(self, nodes):
        return 0.5 if self.gpus > 1 else 0.0


def ends(jobs, gpus, order=least_work_first):
    log = Iterations(gpus, order, COSTS).run(jobs)
    return iteration_ends(log, jobs, gpus, COSTS)


@pytest.fixture(scope="module")
def simulated():
    """Some jobs of which a GPU cannot hold all, and their log."""
    jobs = [
        NodeJob(replace(job, steps=4), lcm(job.gpus, 4), 4)
        for job in read_workload(1, GPUS)[:20]
    ]
    log = Iterations(GPUS, least_work_first, COSTS).run(jobs)
    return jobs, log


def first(log, key):
    return next(number for number, task in enumerate(log) if key(task))


def change(key, **changes):
    """Replaces fields of the first task that is meant, by functions of it."""

    def mutate(log):
        number = first(log, key)
        values = {name: new(log[number]) for name, new in changes.items()}
        log[number] = log[number]._replace(**values)

    return mutate


def any_task(task):
    return True


def evict(log):
    """Drops an eviction."""
    change(lambda task: task.evicted, evicted=lambda _: ())(log)


def later(log, seconds):
    """Moves the first task of a second step, and those behind it."""
    number = first(log, lambda task: task.step)
    log[number:] = [
        task._replace(start=task.start + seconds, end=task.end + seconds)
        for task in log[number:]
    ]


MUTATIONS = {
    "task dropped": (lambda log: log.pop(), "not complete"),
    "early task dropped": (lambda log: log.pop(0), "wrong (step|seconds)"),
    "task twice": (lambda log: log.insert(1, log[0]), "wrong node"),
    "order": (lambda log: later(log, -1000), "later start"),
    "job": (change(any_task, job=lambda _: "none"), "unknown job"),
    "GPU": (change(any_task, gpu=lambda _: GPUS), "unknown GPU"),
    "node": (change(any_task, node=lambda _: 99), "wrong node"),
    "step": (change(any_task, step=lambda _: 1), "wrong step"),
    "end": (change(any_task, end=lambda task: task.end - 0.1), "seconds"),
    "end late": (change(any_task, end=lambda task: task.end + 0.1), "seconds"),
    "before arrival": (
        change(
            any_task,
            start=lambda task: task.start - 1,
            end=lambda task: task.end - 1,
        ),
        "too early",
    ),
    "barrier": (lambda log: later(log, -0.01), "too early"),
    "memory": (evict, "too little memory"),
    "foreign copy": (
        change(any_task, evicted=lambda _: ("none",)),
        "no such copy",
    ),
    "own copy": (
        change(lambda task: task.step, evicted=lambda task: (task.job,)),
        "too little memory",
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutated_log_is_rejected(simulated, mutation):
    jobs, log = simulated
    assert len(iteration_ends(log, jobs, GPUS, COSTS)) == len(jobs)
    mutated = [*log]
    mutate, message = MUTATIONS[mutation]
    mutate(mutated)
    with pytest.raises(ValueError, match=message):
        iteration_ends(mutated, jobs, GPUS, COSTS)


def test_log_of_one_gpu_for_two_tasks_is_rejected():
    jobs = [NodeJob(FixedJob("A", 0, "", gpus=2, batch=3, steps=1), nodes=2)]
    log = [Task(0, 4, "A", 0, 0, 0), Task(0, 4, "A", 0, 1, 0)]
    with pytest.raises(ValueError, match="in use"):
        iteration_ends(log, jobs, GPUS, COSTS)


def test_log_with_more_gpus_than_the_job_asks_for_is_rejected():
    jobs = [NodeJob(FixedJob("A", 0, "", gpus=1, batch=4, steps=1), nodes=2)]
    log = [Task(0, 3, "A", 0, 0, 0), Task(0, 3, "A", 0, 1, 1)]
    with pytest.raises(ValueError, match="too many GPUs"):
        iteration_ends(log, jobs, GPUS, COSTS)


@pytest.mark.parametrize("segments", [1, 2, 4, 8])
def test_each_node_gets_each_depth_in_turn(segments):
    job = FixedJob("", 0, "", gpus=1, batch=3, steps=1)
    nodes = NodeJob(job, 2 * segments, segments)
    steps, depths = range(segments), [*range(segments)]
    for node in range(nodes.nodes):
        assert sorted(nodes.depth(s, node) for s in steps) == depths
    if segments == 4:
        assert [nodes.depth(0, node) for node in (0, 2, 4, 6)] == [0, 1, 3, 2]
    # One second forward, and of two backward the mean of the kept parts.
    beta = (segments + 1) / (2 * segments)
    for step in steps:
        step_seconds = [nodes.seconds(step, v) for v in range(nodes.nodes)]
        assert sum(step_seconds) == pytest.approx(1 + 2 * beta)


def test_segments_divide_the_nodes():
    job = FixedJob("", 0, "", gpus=6, batch=3, steps=1)
    assert [NodeJob(job, n, 4).segments for n in (1, 3, 6, 12)] == [1, 1, 2, 4]


@pytest.mark.parametrize(
    ("order", "memory", "expected"),
    [
        # B is loaded, runs to its end, and A is loaded.
        (least_work_first, 0.5, {"A": 8, "B": 3}),
        # A, B, A, B, A, A: two loads and three switches ...
        (least_advanced_first, 0.5, {"A": 9.5, "B": 7}),
        # ... or five loads.
        (least_advanced_first, 0.6, {"A": 11, "B": 8}),
    ],
)
def test_tasks_of_one_gpu_are_as_by_hand(order, memory, expected):
    jobs = [
        NodeJob(FixedJob(name, 0, "", 1, 1, steps, memory=memory), 1)
        for name, steps in (("A", 4), ("B", 2))
    ]
    assert ends(jobs, 1, order) == pytest.approx(expected)


def test_partial_backward_leaves_time_to_another_job():
    # Tasks of A take 3 and 2 s.  Its shallow one ends at 3, and B's of 1 s
    # gets the GPU, is loaded until 4 and ends at 5, while A ends at 4 and
    # synchronises until 4.5.  The deep task of step 2 starts at once on the
    # other GPU, the shallow one on B's at 5 with a switch, until 7.5.
    jobs = [
        NodeJob(FixedJob("A", 0, "", gpus=2, batch=3, steps=2), 2, 2),
        NodeJob(FixedJob("B", 0.1, "", gpus=1, batch=1, steps=1), 1, 2),
    ]
    assert ends(jobs, 2) == pytest.approx({"A": 8, "B": 5})


def test_blocks_of_steps_keep_the_ratios():
    jobs = [
        replace(job, arrival=5.0 * i, steps=job.steps // 8)
        for i, job in enumerate(read_workload(1, GPUS)[:20])
    ]
    costs = Costs(0.0066, 0.1)

    def ratio(block):
        """Mean JCT with partial backward over that without."""
        scaled, means = Costs(*(block * cost for cost in costs)), []
        for segments in (4, 1):
            tasks = [NodeJob(job, job.gpus, segments, block) for job in jobs]
            log = Iterations(GPUS, least_work_first, scaled).run(tasks)
            last = iteration_ends(log, tasks, GPUS, scaled)
            means.append(fmean(last[job.name] - job.arrival for job in jobs))
        return means[0] / means[1]

    assert ratio(8) == pytest.approx(ratio(1), rel=0.02)


def test_trace_is_read(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(f"{HEADER}1,8,30,133,vgg11,147\n0,1,9,606,vgg19,164\n")
    one, other = read_trace(path, GPUS)
    assert (one.name, one.arrival, one.sync_seconds(1)) == ("job 0", 9, 0)
    assert other.step_seconds(8) == pytest.approx(147 / 133)
    # 132.9 million gradients of 4 bytes, 14/8 times, at 5 and 10 GB/s.
    assert other.sync_seconds(2) == pytest.approx(0.186, abs=1e-3)
    assert other.step_seconds(8, 1) == pytest.approx(147 / 133 - 0.093, 1e-3)
    assert 0 < one.memory < 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0,16,0,10,vgg19,20", "num_gpu is '16'; give a number from 1 to 8"),
        ("0,1,x,10,vgg19,20", "submit_time is 'x'; give a number"),
        ("0,1,nan,10,vgg19,20", "submit_time is 'nan'; give a number"),
        ("0,1,0,0,vgg19,20", "iterations is '0'; give a number from 1"),
        ("0,1,0,10,gpt,20", "model_name is 'gpt'; give one of .*vgg19"),
        ("0,8,0,10,vgg19,1", "duration is '1'; give a number from 2.01"),
        ("0,1,0,10,vgg19", "duration is None; give a number"),
    ],
)
def test_bad_trace_is_an_error_with_its_line(tmp_path, row, message):
    path = tmp_path / "trace.csv"
    path.write_text(f"{HEADER}0,1,0,10,vgg19,20\n{row}\n")
    with pytest.raises(ValueError, match=f"trace.csv, line 3: {message}"):
        read_trace(path, GPUS)


def test_command_compares_single_iterations(tmp_path, capsys):
    trace, path = tmp_path / "trace.csv", tmp_path / "iterations.json"
    jobs = [f"{i},{2 ** (i % 4)},{9 * i},20,vgg19,20" for i in range(12)]
    trace.write_text(HEADER + "\n".join(jobs))
    options = ["--iterations", "--trace", str(trace), "--json", str(path)]
    assert cluster.main(["--quick", *options]) == 0
    report = json.loads(path.read_text())
    rows = {
        tuple(row[key] for key in ("trace", "density", "policy")): row
        for row in report["rows"]
    }
    assert len(rows) == 4 * 6
    for ratio in report["ratios"]:
        values = (
            rows[ratio["trace"], ratio["density"], ratio[key]]
            for key in ("policy", "baseline")
        )
        one, other = (row[ratio["figure"]] for row in values)
        assert ratio["ratio"] == pytest.approx(one / other)
    control = rows["trace.csv", 3.0, "control"]["mean_jct_seconds"]
    assert control > 1.2 * rows["trace.csv", 3.0, "SPB"]["mean_jct_seconds"]
    assert "trace.csv 8 3 SPB gang SRTF gpu_seconds" in capsys.readouterr().out


def test_command_names_a_trace_that_is_missing(tmp_path, capsys):
    options = ["--quick", "--iterations", "--trace", str(tmp_path / "none")]
    assert cluster.main(options) == 1
    assert "none" in capsys.readouterr().err
