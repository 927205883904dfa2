"""What tests of the vLLM side share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from transfer.vllm import remote_library


@pytest.fixture(autouse=True)
def lends_in_time() -> Iterator[None]:
    """On a busy machine the scheduler may take longer to lend than the half second that a worker waits for it."""
    with pytest.MonkeyPatch.context() as patch:  # its own: a test may undo what it patched
        patch.setattr(remote_library, "ANSWER_S", 60.0)
        patch.setattr(remote_library, "GRACE_S", 60.0)
        yield
