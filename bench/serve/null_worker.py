"""A worker without a device: a row's next token is the next id of a counter. Behind real processes, it shows the cost
of a token outside of the worker.

`python -m pagewire.bench.serve.null_worker WORKER_ADDRESS CORE_ADDRESS FIRST_ID NUM_IDS STEP_MS [ENGINE DEVICE_EPOCH]`;
`frontend` and `engines_server` run it.
"""

import sys
import time
from array import array

from ...ipc.epochs import Epochs, Link
from ...ipc.messages import CacheOffer, StepPlan, StepResult, ToWorker, bytes_to_ids
from ...ipc.zmq_channel import ZmqContext, ZmqInbox

NUM_BLOCKS = 1 << 16


class NullWorker:
    """Answers plans. The n-th token of a row is `first_id + n % num_ids`."""

    def __init__(self, *, first_id: int, num_ids: int) -> None:
        self._first_id = first_id
        self._num_ids = num_ids
        self._num_sampled: dict[int, int] = {}  # row → tokens of its request

    def run(self, plan: StepPlan) -> StepResult:
        assert not plan.num_speculative, "the null worker does not support draft tokens"
        for opened in plan.open:
            self._num_sampled[opened.row] = len(bytes_to_ids(opened.ids)) - opened.num_prompt
        ids = array("i")
        for row, is_sampled in zip(bytes_to_ids(plan.rows), plan.sample, strict=True):
            if is_sampled:
                num = self._num_sampled[row]
                self._num_sampled[row] = num + 1
                ids.append(self._first_id + num % self._num_ids)
        return StepResult(plan.step, ids.tobytes(), {}, {}, 0.0)


def main(
    worker_address: str,
    core_address: str,
    first_id: str,
    num_ids: str,
    step_ms: str,
    engine: str = "0",
    device_epoch: str = "1",
) -> None:
    """Serves a core until the process is terminated; a step takes `step_ms`."""
    context = ZmqContext(epochs=Epochs(1, int(device_epoch), engine=int(engine)))
    inbox: ZmqInbox[ToWorker] = context.inbox(worker_address, ToWorker)
    core = context.outbox(core_address, Link.DEVICE)
    worker = NullWorker(first_id=int(first_id), num_ids=int(num_ids))
    core.send(CacheOffer(0, NUM_BLOCKS))
    step_s = float(step_ms) / 1e3
    free_at = 0.0  # end of the last step
    while True:
        inbox.wait(60.0)
        for message in inbox.drain():
            if isinstance(message, StepPlan):
                result = worker.run(message)
                free_at = max(free_at, time.monotonic()) + step_s
                if (early_s := free_at - time.monotonic()) > 0:
                    time.sleep(early_s)
                core.send(result)


if __name__ == "__main__":
    main(*sys.argv[1:])
