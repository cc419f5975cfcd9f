"""One worker comes into being: its pipe, its process, its place on the board, the pipe whose end kills it.

    launch(number, ...) -> WorkerHandle        spawn: an interpreter of its own; forkserver: forked from that;
                                               fork: forked from the template (`pools.template`)

A forked worker has its job, but begins when a message tells it to: it has then taken the death pipe, which comes
before, and ends with its trainer even if the user's code holds the GIL from its first line on.

What can go wrong: no process, no descriptor (OSError). A template that is dead, or hangs, is replaced; those that are
killed one after the other before they fork a worker, a few times.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import multiprocess

from sharded_loader.engine.board import IDLE, SAMPLE, board_in
from sharded_loader.engine.messages import BOARD, DEATH, JOB, SEGMENT, NewJob, pack_head
from sharded_loader.memory.segments import Segment
from sharded_loader.system import can_pass_descriptors
from sharded_loader.workers import spawning, worker
from sharded_loader.workers.link import PORTABLE, Link, make_link
from sharded_loader.workers.resources import WorkerHandle, WorkerResources
from sharded_loader.workers.starting import forget_process, starting_worker
from sharded_loader.workers.template import Template, TemplateGone

TEMPLATES = 5
"""How many templates one worker is tried to be forked from. Whoever kills workers at random may hit two in a row."""


_AS_IT_IS_NOW = "workers are forked from the trainer as it is now: with its threads, and with the dataset as it is now"


def launch(
    number: int, num_workers: int, start_method: str, resources: WorkerResources, new_job: NewJob
) -> WorkerHandle:
    """Start worker ``number`` of ``num_workers``.

    Args:
        number, num_workers, start_method: of the worker.
        resources: gets the template, and has the board and the death pipe.
        new_job: what it inherits under fork; otherwise it has yet to be sent.
    """
    if multiprocess.current_process().daemon:
        raise RuntimeError(
            "this is a worker process, which may have none of its own: give the loader that the dataset makes "
            "num_workers=0, or threads (thread_pool=True)"
        )
    if start_method == "fork" and not can_pass_descriptors() and len(resources.handles) == num_workers:
        # The template could not be given the worker's end of the pipe, so there is none.
        _warn(f"this system refuses to pass descriptors between processes; {_AS_IT_IS_NOW}")
    templates = 1
    while True:
        try:
            process, link = _start(number, num_workers, start_method, resources, new_job)
            break
        except TemplateGone as error:
            template, resources.template = resources.template, None
            if template is not None:
                template.close()
            if templates == TEMPLATES:
                raise
            templates += 1
            _warn(f"{error}; {_AS_IT_IS_NOW}")
    handle = WorkerHandle(number, process, link)
    resources.tie(process)
    if resources.board is not None:
        handle.board = board_in(resources.board.mapping, number)
        handle.board[SAMPLE] = IDLE
        send_segment(link, resources.board, BOARD, number)
    if resources.death_reader is not None and not PORTABLE:
        if can_pass_descriptors():
            link.send(pack_head(DEATH), descriptor=resources.death_reader)
        else:
            link.send(pack_head(DEATH, content=f"/proc/{os.getpid()}/fd/{resources.death_reader}".encode()))
    if start_method == "fork":
        link.send(pack_head(JOB))
    return handle


def _warn(text: str) -> None:
    """A warning that costs no batch where the user has made warnings errors."""
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    except RuntimeWarning:
        print(f"sharded_loader: {text}", file=sys.stderr, flush=True)


def _start(
    number: int, num_workers: int, start_method: str, resources: WorkerResources, new_job: NewJob
) -> tuple[Any, Link]:
    if start_method == "fork" and resources.template is None and can_pass_descriptors():
        # Before the pipe is made: it would keep the worker's end, and hide that the worker has died.
        resources.template = Template(new_job, num_workers)
    # A pipe for every try: a template that is killed may have forked a worker before, which holds its end.
    ours, theirs = multiprocess.Pipe(duplex=True)
    link = make_link(ours)
    try:
        if resources.template is not None:
            return resources.template.fork(number, theirs), link
        inherited = new_job if start_method == "fork" else None
        return _spawn(number, num_workers, start_method, theirs, inherited), link
    except BaseException:
        link.close()
        raise
    finally:
        theirs.close()


def _spawn(number: int, num_workers: int, start_method: str, conn: Any, inherited: NewJob | None) -> Any:
    process: Any
    if start_method == "spawn" and spawning.AVAILABLE:
        process = spawning.SpawnedProcess(number, num_workers, conn)
    else:
        process = multiprocess.get_context(start_method).Process(
            target=worker.main,
            args=(conn, number, num_workers, inherited),
            name=f"sharded_loader-worker-{number}",
            daemon=True,
        )
    with starting_worker(start_method):
        process.start()
    forget_process(process)
    return process


def send_segment(link: Link, segment: Segment, kind: bytes = SEGMENT, number: int | None = None) -> None:
    """Let a worker know a segment; ``number`` instead of the segment's own."""
    name = (segment.name or "").encode()
    number = segment.number if number is None else number
    link.send(pack_head(kind, number, segment.nbytes, name), descriptor=None if segment.name else segment.fd)
