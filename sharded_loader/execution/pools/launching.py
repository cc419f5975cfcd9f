"""One worker comes into being: its pipe, its process, its place on the board, the pipe whose end kills it.

    launch(number, ...) -> WorkerHandle        spawn: an interpreter of its own; forkserver: forked from that;
                                               fork: forked from the template (`pools.template`)

What can go wrong: no process, no descriptor (OSError). A template that is dead is replaced once.
"""

from __future__ import annotations

from typing import Any

import multiprocess

from sharded_loader.execution import worker
from sharded_loader.execution.board import IDLE, SAMPLE, board_in
from sharded_loader.execution.messages import BOARD, DEATH, SEGMENT, NewJob, pack_head
from sharded_loader.execution.pools import spawning
from sharded_loader.execution.pools.crew import Crew, WorkerHandle
from sharded_loader.execution.pools.link import PORTABLE, Link, make_link
from sharded_loader.execution.pools.starting import forget_process, starting_worker
from sharded_loader.execution.pools.template import Template, TemplateGone
from sharded_loader.memory.segments import Segment


def launch(number: int, num_workers: int, start_method: str, crew: Crew, new_job: NewJob) -> WorkerHandle:
    """Start worker ``number`` of ``num_workers``.

    Args:
        number, num_workers, start_method: of the worker.
        crew: gets the template, and has the board and the death pipe.
        new_job: what it inherits under fork; otherwise it has yet to be sent.
    """
    try:
        process, link = _start(number, num_workers, start_method, crew, new_job)
    except TemplateGone:
        template, crew.template = crew.template, None
        if template is not None:
            template.close()
        process, link = _start(number, num_workers, start_method, crew, new_job)
    handle = WorkerHandle(number, process, link)
    if crew.board is not None:
        handle.board = board_in(crew.board.mapping, number)
        handle.board[SAMPLE] = IDLE
        send_segment(link, crew.board, BOARD, number)
    if crew.death_reader is not None and not PORTABLE:
        link.send(pack_head(DEATH), descriptor=crew.death_reader)
    return handle


def _start(number: int, num_workers: int, start_method: str, crew: Crew, new_job: NewJob) -> tuple[Any, Link]:
    # A pipe for every try: a template that is killed may have forked a worker before, which holds its end.
    ours, theirs = multiprocess.Pipe(duplex=True)
    link = make_link(ours)
    try:
        if start_method == "fork":
            if crew.template is None:
                crew.template = Template(new_job, num_workers)
            return crew.template.fork(number, theirs), link
        return _spawn(number, num_workers, start_method, theirs), link
    except BaseException:
        link.close()
        raise
    finally:
        theirs.close()


def _spawn(number: int, num_workers: int, start_method: str, conn: Any) -> Any:
    process: Any
    if start_method == "spawn" and spawning.AVAILABLE:
        process = spawning.SpawnedProcess(number, num_workers, conn)
    else:
        process = multiprocess.get_context(start_method).Process(
            target=worker.main,
            args=(conn, number, num_workers, None),
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
