"""How many requests the next decode batch of a pipeline has. Pure.

Work stealing between batches (TD-Pipe, arXiv 2506.10470). A pipeline of n stages decodes n batches at once, and its
slowest stage sets its pace, so batches of one size lose nothing. They do not stay so: requests end in one batch and
not in another. So a batch that returns is evened to the mean of all live requests over the stages. What it has above
the mean is withheld, and a later batch with fewer takes it.
"""

from __future__ import annotations


class Evening:
    """Decides the size of each batch. `stages`: those of the pipeline, at least 1."""

    def __init__(self, stages: int) -> None:
        self._stages, self._carry = stages, 0

    def size(self, ready: int, live: int) -> int:
        """The requests of the next batch.

        `ready`: those that could be in it: what has returned, and what was withheld before. `live`: all requests that
        decode, in batches under way or ready. Live ones that are withheld count: a mean of submitted batches alone
        would keep some of them from every later batch.

        Rounding is carried from batch to batch, so that as many batches as there are stages have all live requests.
        """
        if ready <= 0:
            return 0
        share, self._carry = divmod(self._carry + live, self._stages)
        return min(ready, max(share, 1))
