"""llama.cpp through llama-cpp-python's low-level calls: decode rows first, then prompts' chunks, one sequence each."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import llama_cpp
import numpy as np

from benchmarks.workloads import VOCAB_SIZE, Clock, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.workloads import Work

BATCH_TOKENS = 512
SEQUENCES = 32
F16, F32 = 1, 0


def main(model: str, dtype: str, names: str, round_number: str) -> None:
    """Run the workloads once."""
    llama_cpp.llama_backend_init()
    loaded = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 16_384, BATCH_TOKENS, BATCH_TOKENS, SEQUENCES
    params.n_threads = params.n_threads_batch = 2
    params.kv_unified = True
    params.type_k = params.type_v = F32 if dtype == "float32" else F16
    context = llama_cpp.llama_init_from_model(loaded, params)
    memory = llama_cpp.llama_get_memory(context)
    batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def decode(rows: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Run rows of (token, position, sequence, wants logits); return the best next token of those that want it."""
        for place, (token, position, sequence, wants) in enumerate(rows):
            batch.token[place], batch.pos[place], batch.logits[place] = token, position, wants
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
        batch.n_tokens = len(rows)
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        return {
            sequence: int(
                np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, place), shape=(VOCAB_SIZE,)).argmax()
            )
            for place, (_, _, sequence, wants) in enumerate(rows)
            if wants
        }

    def serve(work: Sequence[Work], clock: Clock) -> None:
        llama_cpp.llama_memory_clear(memory, True)
        done = [0] * len(work)
        made = [0] * len(work)
        last = [0] * len(work)
        live = set(range(len(work)))
        while live:
            rows = [(last[s], len(work[s].prompt) + made[s] - 1, s, True) for s in sorted(live) if made[s]]
            for s in sorted(live):
                prompt = work[s].prompt
                while done[s] < len(prompt) and len(rows) < BATCH_TOKENS:
                    rows.append((prompt[done[s]], done[s], s, done[s] == len(prompt) - 1))
                    done[s] += 1
            for s, token in decode(rows).items():
                last[s] = token
                made[s] += 1
                clock.token(s)
                if made[s] == work[s].new_tokens:
                    live.discard(s)
                    llama_cpp.llama_memory_seq_rm(memory, s, -1, -1)

    run("llama.cpp", serve, names.split(","), int(round_number))


if __name__ == "__main__":
    main(*sys.argv[1:])
