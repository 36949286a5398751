"""Run pipelines whose stages are processes in network namespaces (bench/network/netns.py)."""

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B

sys.path.insert(0, str(Path(__file__).parents[1] / "network"))
import netns
from systems import Setting, stage_of, steps_of, uses_samples
from tasks import Data, Optimizer, Sizes, batches, data_of, loss_of, parts_of, rate_of

import codec
import codec.torch
from codec.torch.pipelining import CompressedStage

# methods of averaging parameter gradients over replicas; QUANTIZED_ADAM averages momenta instead, in 4 bits
NONE, FLOATS, FOUR_BITS, QUANTIZED_ADAM = "none", "float32", "4 bits", "QuantizedAdam"
FIRST_STEPS = 3  # number of steps of the first epoch in a timed run; the very first step is not counted


@dataclass(frozen=True)
class Job:
    """Run of one setting: a few timed steps, or a complete training run."""

    setting: Setting
    averaging: str = NONE
    timed: int = 0  # number of timed steps after the first epoch; 0: a complete training run


@dataclass(frozen=True)
class Plan:
    """Jobs for a group of ranks. Rank r runs stage r % stages of replica r // stages."""

    sizes: Sizes
    task: str
    stages: int
    rates: Sequence[str]
    jobs: Sequence[Job]
    replicas: int = 1


@dataclass
class Result:
    """Measurements of a job, with one item per step."""

    rate: str
    label: str
    averaging: str
    seconds: list[float]  # seconds from the first rank's start to the last rank's end
    cpu_seconds: list[float]  # CPU seconds of the busiest rank
    sent: list[int]  # bytes that all ranks sent, including headers and acknowledgements
    losses: list[float]
    tcp_rate: float  # TCP rate of the link in bits per second, measured before the job

    @property
    def first(self) -> float:
        """Return the median seconds of the first epoch's timed steps."""
        return statistics.median(self.seconds[1:FIRST_STEPS])

    @property
    def later(self) -> float:
        """Return the median seconds of the timed steps after the first epoch."""
        return statistics.median(self.seconds[FIRST_STEPS:])


def ids_of_steps(sizes: Sizes, timed: int) -> list[torch.Tensor]:
    """Return the ids of the samples in each step of a job."""
    if not timed:
        return batches(sizes)
    first = list(torch.arange(FIRST_STEPS * sizes.batch).split(sizes.batch))
    return first + [first[i % FIRST_STEPS] for i in range(timed)]


# Functions that run on each rank


class Groups:
    """This rank's stage and replica, and its process groups."""

    def __init__(self, stages: int, replicas: int) -> None:
        rank = dist.get_rank()
        self.index, self.replica = rank % stages, rank // stages
        pipelines = [list(range(r * stages, (r + 1) * stages)) for r in range(replicas)]
        same_stage = [list(range(s, stages * replicas, stages)) for s in range(stages)]
        self.pipeline = [dist.new_group(ranks) for ranks in pipelines][self.replica]
        self.replicas = [dist.new_group(ranks) for ranks in same_stage][self.index]


def averaging_of(kind: str, module: torch.nn.Module, group: Any, replicas: int) -> Callable[[], None]:
    """Return a function that averages the gradients of parameters over the replicas of a stage."""
    feedback = codec.torch.Feedback(codec.Quantize(4)) if kind == FOUR_BITS else None

    def average() -> None:
        gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        flat = torch.cat([g.reshape(-1) for g in gradients.values()])
        if feedback is None:
            dist.all_reduce(flat, group=group)
            flat /= replicas
        else:
            codec.torch.all_reduce(codec.view(flat, segments=gradients), op="mean", group=group, feedback=feedback)
        for g, mean in zip(gradients.values(), flat.split([g.numel() for g in gradients.values()]), strict=True):
            g.copy_(mean.view_as(g))

    return average if kind in (FLOATS, FOUR_BITS) else lambda: None


class QuantizedAdam:
    """QuantizedAdam of AQ-SGD's paper: :class:`codec.torch.OneBitAdam` with its default spec, 4-bit momenta.

    Second moments are frozen after a quarter of the training steps, or in a timed run after those of the first epoch.
    """

    def __init__(self, module: torch.nn.Module, sizes: Sizes, group: Any, timed: int) -> None:
        self._sizes, self._step = sizes, 0
        self._adam = codec.torch.OneBitAdam(
            module.parameters(),
            sizes.rate,
            weight_decay=0.01,
            freeze_step=FIRST_STEPS if timed else max(1, sizes.steps // 4),
            warmup=codec.Quantize(4),
        )
        options = codec.options(algorithm="two_shot")
        self._adam.register(module, group=group, max_grad_norm=1.0, options=options)

    def zero_grad(self) -> None:
        self._adam.zero_grad()

    def step(self) -> None:
        for group in self._adam.param_groups:
            group["lr"] = rate_of(self._sizes, self._step)
        self._adam.step()
        self._step += 1


def run_job(plan: Plan, job: Job, groups: Groups, data: Data, weights: Any) -> Iterator[dict[str, Any]]:
    """Run a job on this rank, and yield the measurements of each step."""
    sizes, setting = plan.sizes, job.setting
    module = parts_of(sizes, plan.task, plan.stages, weights)[groups.index]
    quantizes = job.averaging == QUANTIZED_ADAM
    optimizer = QuantizedAdam(module, sizes, groups.replicas, job.timed) if quantizes else Optimizer([module], sizes)
    average = averaging_of(job.averaging, module, groups.replicas, plan.replicas)
    with tempfile.TemporaryDirectory() as folder:
        kept = folder if setting.store == "files" else ""
        stage = stage_of(setting, module, groups.index, plan.stages, group=groups.pipeline, folder=kept)
        schedule = Schedule1F1B(stage, sizes.micro_batches, loss_fn=loss_of)
        every = [ids.chunk(plan.replicas)[groups.replica] for ids in ids_of_steps(sizes, job.timed)]
        dist.barrier()
        for ids, following in zip(every, [*every[1:], None], strict=True):
            before, cpu, begin = netns.sent_nbytes(), time.process_time(), time.perf_counter()
            if kept and following is not None and isinstance(stage, CompressedStage):
                stage.prefetch(following.tolist())
            losses = one_step(stage, schedule, setting, data, ids)
            average()
            optimizer.step()
            optimizer.zero_grad()
            step = {"begin": begin, "end": time.perf_counter(), "cpu": time.process_time() - cpu}
            dist.barrier()  # after it, all messages of the step have been sent
            step["sent"] = netns.sent_nbytes() - before
            yield step | {"loss": float(torch.stack(losses).mean()) if losses else None}
        if isinstance(stage, CompressedStage):
            stage.close()


def one_step(stage: Any, schedule: Any, setting: Setting, data: Data, ids: torch.Tensor) -> list[torch.Tensor]:
    """Compute the gradients of a batch, and return the losses of its micro-batches on the last stage."""
    losses: list[torch.Tensor] = []
    given = {"sample_ids": ids} if uses_samples(setting) else {}
    for attempt in steps_of(stage):
        losses.clear()
        with attempt:
            if stage.is_first:
                schedule.step(data.x[ids], **given)
            elif stage.is_last:
                schedule.step(target=data.y[ids], losses=losses)
            else:
                schedule.step()
    return [loss.detach() for loss in losses]


def work(plan: Plan, weights: Any) -> None:
    """Run all jobs at all rates on this rank; print a JSON line for each, and a line for each step."""
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    data = data_of(plan.sizes, plan.task)
    for turn, rate in enumerate(plan.rates):
        netns.shape(rate)
        address = f"tcp://{os.environ['MASTER_ADDR']}:{netns.PORT + 1 + turn}"
        dist.init_process_group("gloo", address, timedelta(seconds=300), world, rank)
        groups = Groups(plan.stages, plan.replicas)
        tcp_rate = netns.tcp_rate(rank, world, 0.5)
        for i, job in enumerate(plan.jobs):
            steps: list[dict[str, Any]] = []
            for step in run_job(plan, job, groups, data, weights):
                steps.append(step)
                print("step", flush=True)
            row = {"job": i, "rate": rate, "tcp_rate": tcp_rate, "steps": steps}
            print(json.dumps(row), flush=True)
        dist.barrier()
        dist.destroy_process_group()
    print(json.dumps({"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}), flush=True)


# Functions that run in the parent process


def run(plan: Plan, weights: Any, advance: Callable[[int], None], timeout: float = 1500) -> list[Result]:
    """Run the jobs of a plan, and return their measurements. `advance` is called with the number of steps done."""
    world = plan.stages * plan.replicas
    threads = dict.fromkeys(("OMP_NUM_THREADS", "CODEC_NUM_THREADS"), "1")
    environment = threads | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}

    def on_line(rank: int, line: str) -> None:
        if rank == 0 and line == "step":
            advance(1)

    with tempfile.TemporaryDirectory() as folder, netns.Network(world) as network:
        file = Path(folder) / "plan.pt"
        torch.save({"plan": asdict(plan), "weights": weights}, file)
        command = [sys.executable, __file__, str(file)]
        found = network.run(command, environment=environment, timeout=timeout, on_line=on_line, bind=True)
    of_ranks = [[row for row in rows if "job" in row] for rows in found]
    return [joined(plan, rows) for rows in zip(*of_ranks, strict=True)]


def joined(plan: Plan, rows: Sequence[dict[str, Any]]) -> Result:
    """Combine the measurements of all ranks, which share a clock, into a Result."""
    job = plan.jobs[rows[0]["job"]]
    result = Result(rows[0]["rate"], job.setting.label, job.averaging, [], [], [], [], min(r["tcp_rate"] for r in rows))
    for of_ranks in zip(*(row["steps"] for row in rows), strict=True):
        result.seconds.append(max(s["end"] for s in of_ranks) - min(s["begin"] for s in of_ranks))
        result.cpu_seconds.append(max(s["cpu"] for s in of_ranks))
        result.sent.append(sum(s["sent"] for s in of_ranks))
        losses = [s["loss"] for s in of_ranks if s["loss"] is not None]
        result.losses.append(sum(losses) / len(losses))
    return result


def plan_of(given: dict[str, Any]) -> Plan:
    jobs = [Job(Setting(**j["setting"]), j["averaging"], j["timed"]) for j in given["jobs"]]
    sizes = Sizes(**given["sizes"])
    return Plan(sizes, given["task"], given["stages"], given["rates"], jobs, given["replicas"])


def steps_in(plan: Plan) -> int:
    """Return the number of steps of all jobs of a plan."""
    return len(plan.rates) * sum(len(ids_of_steps(plan.sizes, j.timed)) for j in plan.jobs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Run one rank of a plan. bench/pipeline/pipeline.py starts this script."
    )
    parser.add_argument("plan", type=Path)
    loaded = torch.load(parser.parse_args().plan, weights_only=True)
    work(plan_of(loaded["plan"]), loaded["weights"])


if __name__ == "__main__":
    main()
