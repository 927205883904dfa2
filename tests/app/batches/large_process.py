"""A batch of many lines in a process of its own, whose memory a test looks at: `python -m ... FOLDER LINES`.

It uploads, checks, answers and finishes the batch. Its last line is JSON: the most memory that the process has had
after each step, in KiB, and what has become of the lines.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

from app.batches.batch_rows import create
from app.batches.file_rows import Quota
from app.batches.lease_rows import Lease, take
from app.batches.line_request import LineRequest
from app.batches.line_rows import Result
from app.batches.records import Asked, Batch
from app.batches.run import BatchRun, Parts
from app.batches.slots import Slots
from app.batches.stores import Stores
from app.batches.uploads import upload
from app.batches.validation import Limits, validate
from tests.app.batches.toys import CHAT, DAY_S, Clock, line, stores_in

PIECE = 1000
TEXT = "x" * 300

A = TypeVar("A")


class Caller:
    """Answers each line with its own `custom_id`."""

    async def result(self, batch: Batch, request: LineRequest) -> Result:
        return Result(request.line, True, b'{"custom_id": "%s"}' % request.custom_id.encode())


def text(number: int) -> bytes:
    return json.dumps(line(number, body={"messages": TEXT})).encode() + b"\n"


async def sent(stores: Stores, lines: int) -> str:
    """The id of the uploaded file, whose form is made while it is sent."""
    head = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    head += b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    pieces = iter([head])
    body = (b"".join(map(text, range(at, min(at + PIECE, lines)))) for at in range(0, lines, PIECE))

    async def receive() -> dict[str, Any]:
        piece = next(pieces, None) or next(body, None)
        return {"type": "http.request", "body": piece or b"\r\n--x--\r\n", "more_body": piece is not None}

    headers = [(b"content-type", b"multipart/form-data; boundary=x")]
    return (await upload(stores, {"type": "http", "headers": headers}, receive, 2**31, 60.0)).id


async def ordered(stores: Stores, batch: Batch) -> int:
    """How many lines of the output are those of the input, in order."""
    assert batch.made.output_file_id is not None
    reader = await stores.blobs.reader(batch.made.output_file_id)
    number = 0
    for found in reader.file:
        assert json.loads(found)["custom_id"] == f"id-{number}"
        number += 1
    await reader.close()
    return number


async def main(folder: Path, lines: int) -> dict[str, Any]:
    clock, peaks = Clock(), dict[str, int]()
    stores = stores_in(folder, clock, Quota(9, 2**32, 2**32, 9))
    await stores.prepare()

    async def step(name: str, work: Awaitable[A]) -> A:
        found = await work
        peaks[name] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return found

    asked = Asked(CHAT, await step("upload", sent(stores, lines)), "24h", DAY_S)
    await stores.database.write(lambda c: create(c, "batch_1", "", asked, stores.quota, clock()))
    batch = await stores.database.write(lambda c: take(c, "one", clock()))
    assert batch is not None
    lease, limits = Lease(batch.number, "one", batch.epoch), Limits(lines, 4096)
    batch = await step("check", validate(stores, batch, lease, limits))
    parts = Parts(stores, Caller(), Slots(256), limits)  # type: ignore[arg-type]
    batch = await step("answers", BatchRun(batch, lease, parts).go())
    counts = [batch.counts.total, batch.counts.completed, await ordered(stores, batch)]
    await stores.close()
    return {"peaks": peaks, "status": batch.status, "counts": counts}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))))
