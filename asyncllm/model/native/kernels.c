/* What a decode step on the CPU does between its matrix products, in bfloat16: norms, rope, the KV store, attention.
 *
 * Built by library.py while an engine opens, for the processor it runs on; called on the device's thread, with
 * torch's own OpenMP threads. Every function's plain torch twin is in layer_ops.py or attention/fused.py.
 *
 * Invariant: sums are float32, and their order depends on a row's own length only, never on other rows or threads.
 */
#include "common.h"

/* HEAD_DIM, and GROUP, the query heads of a key head, are the model's: the compiler keeps what has their size in
 * registers. */
#define KEY_BLOCK 64 /* keys whose scores are held at once */

/* 1 / root mean square of x [width]. */
static inline float inverse_rms(const bf16 *x, int64_t width, float eps) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) {
        float value = widen(x[i]);
        sum += value * value;
    }
    return 1.0f / sqrtf(sum / (float)width + eps);
}

/* out [rows, width] = x [rows, width] / root mean square of its row * weight [width]. */
void asyncllm_rms_norm(bf16 *restrict out, const bf16 *restrict x, const bf16 *restrict weight, int64_t rows,
                       int64_t width, float eps) {
#pragma omp parallel for schedule(static) if (rows * width > SERIAL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) {
        const bf16 *in = x + row * width;
        float scale = inverse_rms(in, width, eps);
#pragma omp simd
        for (int64_t i = 0; i < width; i++) out[row * width + i] = narrow(widen(in[i]) * scale * widen(weight[i]));
    }
}

/* A head x [head_dim] turned by its position's cos and sin [head_dim], the first half of sin being negated. */
static inline void turn(bf16 *restrict out, const bf16 *restrict x, const bf16 *restrict cos, const bf16 *restrict sin,
                        const bf16 *restrict norm, float eps) {
    int64_t half = HEAD_DIM / 2;
    float head[HEAD_DIM];
#pragma omp simd
    for (int64_t i = 0; i < HEAD_DIM; i++) head[i] = widen(x[i]);
    if (norm) {
        float scale = inverse_rms(x, HEAD_DIM, eps);
#pragma omp simd
        for (int64_t i = 0; i < HEAD_DIM; i++) head[i] *= scale * widen(norm[i]);
    }
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float low = head[i], high = head[i + half];
        out[i] = narrow(low * widen(cos[i]) + high * widen(sin[i]));
        out[i + half] = narrow(high * widen(cos[i + half]) + low * widen(sin[i + half]));
    }
}

/* Turn the queries and keys of qkv [tokens, heads + 2 * kv_heads, head_dim]; write queries [tokens, heads, head_dim],
 * and keys and values to their cells [cells, kv_heads, head_dim]. cos and sin are whole tables, [positions, head_dim];
 * norms [heads + kv_heads, head_dim] or null. */
void asyncllm_rotate_and_store(bf16 *restrict queries, bf16 *restrict keys, bf16 *restrict values,
                               const bf16 *restrict qkv, const bf16 *restrict cos, const bf16 *restrict sin,
                               const bf16 *restrict norms, const int64_t *restrict positions,
                               const int64_t *restrict cells, int64_t tokens, int64_t heads, int64_t kv_heads,
                               float eps) {
    int64_t token_size = (heads + 2 * kv_heads) * HEAD_DIM, kv_size = kv_heads * HEAD_DIM;
#pragma omp parallel for schedule(static) if (tokens * token_size > SERIAL_ELEMENTS)
    for (int64_t token = 0; token < tokens; token++) {
        const bf16 *in = qkv + token * token_size;
        const bf16 *c = cos + positions[token] * HEAD_DIM, *s = sin + positions[token] * HEAD_DIM;
        bf16 *key = keys + cells[token] * kv_size;
        for (int64_t head = 0; head < heads + kv_heads; head++) {
            bf16 *out = head < heads ? queries + (token * heads + head) * HEAD_DIM : key + (head - heads) * HEAD_DIM;
            turn(out, in + head * HEAD_DIM, c, s, norms ? norms + head * HEAD_DIM : NULL, eps);
        }
        memcpy(values + cells[token] * kv_size, in + (heads + kv_heads) * HEAD_DIM, kv_size * sizeof(bf16));
    }
}

/* Attention over some keys of one row and key head, before the division by the sum of weights. */
typedef struct {
    float best[GROUP]; /* largest score */
    float sum[GROUP];  /* of weights, relative to it */
} Softmax;

/* 16 floats: a register, or several. */
typedef float vector __attribute__((vector_size(64)));
typedef uint32_t bits16 __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));
enum { LANES = 16, VECTORS = HEAD_DIM / LANES };

static inline vector load(const bf16 *from) {
    halves half;
    memcpy(&half, from, sizeof half);
    return (vector)(__builtin_convertvector(half, bits16) << 16);
}

/* The sum of the lanes: each step adds one half of the lanes to the other. */
static inline float sum_of(vector x) {
    typedef float half __attribute__((vector_size(32)));
    typedef float quarter __attribute__((vector_size(16)));
    half by8 = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
               __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    quarter by4 = __builtin_shufflevector(by8, by8, 0, 1, 2, 3) + __builtin_shufflevector(by8, by8, 4, 5, 6, 7);
    by4 += __builtin_shufflevector(by4, by4, 2, 3, 0, 1);
    return by4[0] + by4[1];
}

/* Add `count` keys to what the query heads q [group, head_dim] of one key head have added up; total likewise. */
static inline void attend_block(float *restrict total, Softmax *softmax, const bf16 *restrict q,
                                const bf16 *restrict keys, const bf16 *restrict values, int64_t count, int64_t stride,
                                float scale) {
    vector query[GROUP][VECTORS], sum[GROUP][VECTORS];
    float weights[GROUP][KEY_BLOCK];
    for (int g = 0; g < GROUP; g++)
        for (int i = 0; i < VECTORS; i++) query[g][i] = load(q + g * HEAD_DIM + i * LANES) * scale;
    for (int64_t j = 0; j < count; j++) {
        vector score[GROUP] = {0};
        for (int i = 0; i < VECTORS; i++) {
            vector key = load(keys + j * stride + i * LANES);
            for (int g = 0; g < GROUP; g++) score[g] += query[g][i] * key;
        }
        for (int g = 0; g < GROUP; g++) weights[g][j] = sum_of(score[g]);
    }
    memcpy(sum, total, sizeof sum);
    for (int g = 0; g < GROUP; g++) {
        float best = softmax->best[g], added = 0.0f;
#pragma omp simd reduction(max : best)
        for (int64_t j = 0; j < count; j++) best = weights[g][j] > best ? weights[g][j] : best;
#pragma omp simd reduction(+ : added)
        for (int64_t j = 0; j < count; j++) {
            weights[g][j] = exp_of_negative(weights[g][j] - best);
            added += weights[g][j];
        }
        float keep = exp_of_negative(softmax->best[g] - best);
        softmax->sum[g] = softmax->sum[g] * keep + added;
        softmax->best[g] = best;
        for (int i = 0; i < VECTORS; i++) sum[g][i] *= keep;
    }
    for (int64_t j = 0; j < count; j++)
        for (int i = 0; i < VECTORS; i++) {
            vector value = load(values + j * stride + i * LANES);
            for (int g = 0; g < GROUP; g++) sum[g][i] += weights[g][j] * value;
        }
    memcpy(total, sum, sizeof sum);
}

/* Attend from rows of one token, queries [rows, kv_heads * group, head_dim], to all of their keys; out likewise.
 *
 * keys, values: [pages, page_size, kv_heads, head_dim]. page_table: [rows, columns]. kv_lens: [rows].
 * A row's keys are computed in parts of part_keys; those of row r are part_starts[r] to part_starts[r + 1]. An item is
 * parts that have the same keys, of several rows, or one part: item i is shared_parts[item_starts[i]] to that of i + 1,
 * which are of the rows shared_rows. scratch: [parts, kv_heads, group * head_dim + 2 * GROUP]. */
void asyncllm_attend(bf16 *restrict out, float *restrict scratch, const bf16 *restrict queries,
                     const bf16 *restrict keys, const bf16 *restrict values, const int32_t *restrict page_table,
                     const int32_t *restrict kv_lens, const int32_t *restrict part_starts,
                     const int32_t *restrict item_starts, const int32_t *restrict shared_parts,
                     const int32_t *restrict shared_rows, int64_t items, int64_t rows, int64_t columns,
                     int64_t part_keys, int64_t page_size, int64_t kv_heads, float scale) {
    const int64_t group_size = GROUP * HEAD_DIM, cell = group_size + 2 * GROUP, stride = kv_heads * HEAD_DIM;
#pragma omp parallel if (part_starts[rows] * kv_heads > 4)
    {
#pragma omp for schedule(dynamic)
        for (int64_t place = 0; place < items * kv_heads; place++) {
            int64_t item = place / kv_heads, kv_head = place % kv_heads;
            int64_t from = item_starts[item], to = item_starts[item + 1], row = shared_rows[from];
            int64_t first = (shared_parts[from] - part_starts[row]) * part_keys;
            int64_t last = first + part_keys < kv_lens[row] ? first + part_keys : kv_lens[row];
            const int32_t *pages = page_table + row * columns;
            for (int64_t shared = from; shared < to; shared++) {
                float *total = scratch + (shared_parts[shared] * kv_heads + kv_head) * cell;
                Softmax *softmax = (Softmax *)(total + group_size);
                memset(total, 0, cell * sizeof *total);
                for (int g = 0; g < GROUP; g++) softmax->best[g] = -INFINITY;
            }
            for (int64_t start = first, count; start < last; start += count) {
                int64_t offset = start % page_size; /* a block ends with its page */
                count = last - start < page_size - offset ? last - start : page_size - offset;
                count = count < KEY_BLOCK ? count : KEY_BLOCK;
                int64_t at = (pages[start / page_size] * page_size + offset) * stride + kv_head * HEAD_DIM;
                for (int64_t shared = from; shared < to; shared++) { /* the block is read from memory once */
                    float *total = scratch + (shared_parts[shared] * kv_heads + kv_head) * cell;
                    attend_block(total, (Softmax *)(total + group_size),
                                 queries + (shared_rows[shared] * kv_heads + kv_head) * group_size, keys + at,
                                 values + at, count, stride, scale);
                }
            }
        }
#pragma omp for schedule(static)
        for (int64_t place = 0; place < rows * kv_heads; place++) {
            int64_t row = place / kv_heads, kv_head = place % kv_heads;
            for (int64_t g = 0; g < GROUP; g++) {
                float best = -INFINITY, sum = 0.0f, merged[HEAD_DIM] = {0};
                for (int64_t part = part_starts[row]; part < part_starts[row + 1]; part++) {
                    Softmax *softmax = (Softmax *)(scratch + (part * kv_heads + kv_head) * cell + group_size);
                    best = softmax->best[g] > best ? softmax->best[g] : best;
                }
                for (int64_t part = part_starts[row]; part < part_starts[row + 1]; part++) {
                    float *part_out = scratch + (part * kv_heads + kv_head) * cell;
                    Softmax *softmax = (Softmax *)(part_out + group_size);
                    float weight = exp_of_negative(softmax->best[g] - best);
                    sum += weight * softmax->sum[g];
                    for (int64_t i = 0; i < HEAD_DIM; i++) merged[i] += weight * part_out[g * HEAD_DIM + i];
                }
                bf16 *to = out + (place * GROUP + g) * HEAD_DIM;
                for (int64_t i = 0; i < HEAD_DIM; i++) to[i] = narrow(merged[i] / sum);
            }
        }
    }
}
