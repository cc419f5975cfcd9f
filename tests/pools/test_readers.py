"""Each kind of job gets its reader."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from sharded_loader.engine.messages import Job
from sharded_loader.engine.reader import Reader
from sharded_loader.engine.stream import Stream
from sharded_loader.pools.readers import reader_for
from sharded_loader.streams.reader import StatefulReader, StreamReader


@pytest.mark.parametrize(
    ("given", "kind"),
    [({}, Reader), ({"keeps_state": True}, StatefulReader), ({"stream": Stream(2, 4)}, StreamReader)],
)
def test_a_job_gets_the_reader_that_it_needs(given: dict[str, Any], kind: type) -> None:
    assert type(reader_for(Job([1, 2, 3], None, 0, **given))) is kind


def test_the_readers_of_iterable_data_are_imported_only_where_there_is_such_data() -> None:
    script = (
        "import sys; from sharded_loader.engine.messages import Job; "
        "from sharded_loader.pools.readers import reader_for; "
        "reader_for(Job([1], None, 0)); print('sharded_loader.streams.reader' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
