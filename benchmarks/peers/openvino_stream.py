"""OpenVINO GenAI: its continuous batching pipeline, KV cache in the compute dtype, prefix caching on."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
import openvino
import openvino_genai

from benchmarks.workloads import Clock, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.workloads import Work


def main(model: str, dtype: str, names: str, round_number: str) -> None:
    """Run the workloads once."""
    precision = {"bfloat16": "bf16", "float32": "f32"}[dtype]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 1  # GB
    scheduler.max_num_batched_tokens = 512
    scheduler.max_num_seqs = 64
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": 2, "INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
    next_id = 0

    def serve(work: Sequence[Work], clock: Clock) -> None:
        nonlocal next_id
        handles = {}
        for number, one in enumerate(work):
            config = openvino_genai.GenerationConfig(
                max_new_tokens=one.new_tokens,
                min_new_tokens=one.new_tokens,
                ignore_eos=True,
                do_sample=False,
                apply_chat_template=False,
            )
            ids = openvino.Tensor(np.array([one.prompt], dtype=np.int64))
            handles[number] = (pipeline.add_request(next_id, ids, config), one.new_tokens)
            next_id += 1
        left = {number: new_tokens for number, (_, new_tokens) in handles.items()}
        while left:
            pipeline.step()
            for number in list(left):
                handle = handles[number][0]
                while handle.can_read():
                    for output in handle.read().values():
                        clock.token(number, len(output.generated_ids))
                        left[number] -= len(output.generated_ids)
                if left[number] <= 0:
                    del left[number]

    run("OpenVINO GenAI", serve, names.split(","), int(round_number))


if __name__ == "__main__":
    main(*sys.argv[1:])
