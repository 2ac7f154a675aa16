"""Several processes of one gloo group, for tests: a worker runs in each, and what it returns, or how it failed, comes back in order of rank."""
import datetime
import io
import multiprocessing
import os
import tempfile
import traceback

import torch
import torch.distributed as dist


def _main(worker, rank, world, rendezvous, seconds, pipe, arguments):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=seconds))
        outcome = worker(rank, world, *arguments), None
    except Exception:
        outcome = None, traceback.format_exc()
    buffer = io.BytesIO()
    torch.save(outcome, buffer)                                 # tensors by value: a pipe of torch's own would lend shared memory of a process that ends
    pipe.send_bytes(buffer.getvalue())
    pipe.close()


def start(worker, world, *arguments, timeout=60):
    """(processes, pipes), one a rank. `timeout`, in seconds, is the group's."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.tensor", "kernels"])
    rendezvous = os.path.join(tempfile.mkdtemp(prefix="dce"), "store")
    processes, pipes = [], []
    for rank in range(world):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_main, args=(worker, rank, world, rendezvous, timeout, there, arguments), daemon=True)
        process.start()
        there.close()
        processes.append(process)
        pipes.append(here)
    return processes, pipes


def receive(pipe, seconds):
    """(result, None) or (None, how it failed)."""
    if not pipe.poll(seconds):
        return None, f"nothing within {seconds} seconds"
    try:
        return torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
    except EOFError:
        return None, "the process is gone"


def run(worker, world, *arguments, seconds=120):
    """What `worker(rank, world, *arguments)` returns on each rank; fails if one does."""
    processes, pipes = start(worker, world, *arguments)
    outcomes = [receive(pipe, seconds) for pipe in pipes]
    for process in processes:
        process.join(5)
        if process.is_alive():
            process.kill()
    for rank, (_, error) in enumerate(outcomes):
        assert error is None, f"rank {rank}: {error}"
    return [result for result, _ in outcomes]
