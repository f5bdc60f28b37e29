/* Attention in bfloat16 on a processor's matrix unit (AMX).
 *
 * Built and called like kernels.c; its twins in torch are attention/fused.py and attention/chunks.py. Query heads of
 * whatever tokens attend to the same keys are lanes beside each other: lane l of a step is head l % GROUP, of those
 * that share a key head, of token l / GROUP. Scores come out transposed, [keys, lanes], so that keys are taken as they
 * lie and a softmax runs down the lanes of a register.
 *
 * Invariant: a lane's sums are float32, in the order of its keys, in blocks and parts at fixed positions: its result
 * does not depend on where a chunk begins or on what is beside it.
 */
#include "common.h"
#include "tiles.h"

#if defined(ASYNCLLM_TILES) && HEAD_DIM % 32 == 0

#define LANES (2 * TILE) /* that are computed at once */
#define KEYS 64          /* whose scores are held at once */

int asyncllm_can_attend_tiles(void) { return may_use_tiles(); }

/* What 32 lanes have added up so far. */
typedef struct {
    float total[LANES][HEAD_DIM]; /* of values by weight */
    float best[LANES];            /* largest score */
    float sum[LANES];             /* of weights, relative to it */
} __attribute__((aligned(64))) Sums;

/* to [16, 16] = from [16, 16] transposed, numbers of 32 bits; strides in numbers. */
static inline void transpose(uint32_t *restrict to, int64_t to_stride, const uint32_t *restrict from,
                             int64_t from_stride) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from + i * from_stride);
    for (int i = 0; i < 16; i += 2) { /* pairs of rows by number, then by two, by four, by eight */
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 16; j += 8) {
            b[j + i] = _mm512_shuffle_i32x4(a[j + i], a[j + i + 4], 0x88);
            b[j + i + 4] = _mm512_shuffle_i32x4(a[j + i], a[j + i + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        _mm512_storeu_si512(to + i * to_stride, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
        _mm512_storeu_si512(to + (i + 8) * to_stride, _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
    }
}

/* A block's keys and values, as tiles are loaded from them. */
typedef struct {
    const bf16 *keys[KEYS / TILE]; /* where each 16 keys begin */
    int64_t key_stride;            /* bytes from key to key */
    int64_t count;                 /* keys, rounded up to whole tiles of values; those that are none are not finite, maybe */
    bf16 copied[KEYS * HEAD_DIM];  /* keys of pages that no tile fits into */
    bf16 values[KEYS * HEAD_DIM];  /* in pairs, [keys / 2, head_dim, 2]; zero where there is none */
} Block;

/* Find `count` keys and values that begin at position `first` of a row; stride: of a cell. */
static inline void gather(Block *restrict block, const bf16 *restrict keys, const bf16 *restrict values,
                          const int32_t *pages, int64_t page_size, int64_t first, int64_t count, int64_t stride) {
    static const bf16 nothing[HEAD_DIM];
    const bf16 *value_rows[KEYS];
    int64_t page = first / page_size, offset = first % page_size, in_place = page_size % TILE == 0;
    block->count = (count + DEPTH - 1) / DEPTH * DEPTH;
    block->key_stride = 2 * (in_place ? stride : HEAD_DIM);
    for (int64_t j = 0; j < block->count; j++) {
        int64_t at = j < count ? (pages[page] * page_size + offset) * stride : 0;
        if (j % TILE == 0) block->keys[j / TILE] = in_place ? keys + at : block->copied + j * HEAD_DIM;
        if (!in_place) memcpy(block->copied + j * HEAD_DIM, keys + at, sizeof nothing);
        value_rows[j] = j < count ? values + at : nothing;
        if (++offset == page_size) page++, offset = 0;
    }
    for (int64_t j = 0; j < block->count; j += 2)
        for (int64_t i = 0; i < HEAD_DIM; i += TILE) {
            __m512i even = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(value_rows[j] + i)));
            __m512i odd = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(value_rows[j + 1] + i)));
            _mm512_storeu_si512(block->values + j * HEAD_DIM + 2 * i,
                                _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
        }
}

/* e^(score - top), for score <= top; 0 for a key that is not seen. `exp_of_negative` for 16 lanes. */
static inline __m512 weigh(__m512 score, __m512 top) {
    __m512 x = _mm512_max_ps(_mm512_set1_ps(-87.0f), _mm512_sub_ps(score, top)); /* what is not a number stays that */
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.3981999e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.333452e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666667e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    __mmask16 seen = _mm512_cmp_ps_mask(score, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
    return _mm512_maskz_scalef_ps(seen, p, n);
}

/* Turn scores [keys, 16 lanes] into weights [16 lanes, keys], two to a number; scale `sums` of these lanes to them.
 *
 * Keys after a lane's last are not seen. */
static inline void soften(uint32_t *restrict weights, float *restrict scores, Sums *restrict sums, int64_t lane,
                          const int32_t *restrict last, int64_t first_key, int64_t count, float scale) {
    const __m512 unseen = _mm512_set1_ps(-INFINITY);
    __m512 top = _mm512_load_ps(sums->best + lane), before = top, total = _mm512_setzero_ps();
    for (int key = 0; key < count; key++) {
        __m512i position = _mm512_set1_epi32((int32_t)first_key + key);
        __mmask16 seen = _mm512_cmple_epi32_mask(position, _mm512_loadu_si512(last));
        __m512 score = _mm512_mul_ps(_mm512_load_ps(scores + key * TILE), _mm512_set1_ps(scale));
        score = _mm512_mask_mov_ps(unseen, seen, score);
        _mm512_store_ps(scores + key * TILE, score);
        top = _mm512_max_ps(score, top);
    }
    uint32_t paired[KEYS / 2][TILE] __attribute__((aligned(64)));
    for (int key = 0; key < count; key += 2) {
        __m512 even = weigh(_mm512_load_ps(scores + key * TILE), top);
        __m512 odd = weigh(_mm512_load_ps(scores + (key + 1) * TILE), top);
        total = _mm512_add_ps(total, _mm512_add_ps(even, odd));
        __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even));
        __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd));
        _mm512_store_si512(paired[key / 2], _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
    for (int key = 0; key < count; key += DEPTH) transpose(weights + key / 2, KEYS / 2, paired[key / 2], TILE);
    __m512 keep = weigh(before, top);
    _mm512_store_ps(sums->best + lane, top);
    _mm512_store_ps(sums->sum + lane, _mm512_fmadd_ps(_mm512_load_ps(sums->sum + lane), keep, total));
    float kept[TILE] __attribute__((aligned(64)));
    _mm512_store_ps(kept, keep);
    for (int i = 0; i < TILE; i++)
#pragma omp simd
        for (int j = 0; j < HEAD_DIM; j++) sums->total[lane + i][j] *= kept[i];
}

/* Add a block of keys to the sums of `halves` times 16 lanes, queries [halves, head_dim / 2, 16, 2]. */
static inline void attend_block(Sums *sums, const bf16 *queries, const Block *block, const int32_t *last,
                                int64_t first_key, int halves, float scale) {
    float scores[2][KEYS * TILE] __attribute__((aligned(64)));
    uint32_t weights[2][TILE * KEYS / 2] __attribute__((aligned(64)));
    for (int64_t key = 0; key < block->count; key += 2 * TILE) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int i = 0; i < HEAD_DIM; i += DEPTH) {
            _tile_loadd(4, block->keys[key / TILE] + i, block->key_stride);
            _tile_loadd(5, block->keys[key / TILE + 1] + i, block->key_stride);
            _tile_loadd(6, queries + i * TILE, 4 * TILE);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 5, 6);
            if (halves == 2) {
                _tile_loadd(7, queries + (HEAD_DIM + i) * TILE, 4 * TILE);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, scores[0] + key * TILE, 4 * TILE);
        _tile_stored(1, scores[0] + (key + TILE) * TILE, 4 * TILE);
        if (halves == 2) {
            _tile_stored(2, scores[1] + key * TILE, 4 * TILE);
            _tile_stored(3, scores[1] + (key + TILE) * TILE, 4 * TILE);
        }
    }
    for (int half = 0; half < halves; half++)
        soften(weights[half], scores[half], sums, half * TILE, last + half * TILE, first_key, block->count, scale);
    for (int half = 0; half < halves; half++)
        for (int i = 0; i < HEAD_DIM; i += 2 * TILE) {
            float *total = sums->total[half * TILE] + i;
            _tile_loadd(0, total, 4 * HEAD_DIM);
            _tile_loadd(1, total + TILE, 4 * HEAD_DIM);
            for (int64_t key = 0; key < block->count; key += DEPTH) {
                const bf16 *values = block->values + key * HEAD_DIM + 2 * i;
                _tile_loadd(4, weights[half] + key / 2, 2 * KEYS);
                _tile_loadd(6, values, 4 * HEAD_DIM);
                _tile_loadd(7, values + 2 * TILE, 4 * HEAD_DIM);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
            }
            _tile_stored(0, total, 4 * HEAD_DIM);
            _tile_stored(1, total + TILE, 4 * HEAD_DIM);
        }
}

/* Attend from `count` lanes at `queries`, each up to its last key, to the keys first..end of a row. */
static void attend_lanes(Sums *sums, const bf16 *const *queries, const int32_t *last, int64_t count,
                         const bf16 *restrict keys, const bf16 *restrict values, const int32_t *pages, int64_t first,
                         int64_t end, int64_t page_size, int64_t stride, float scale) {
    static const bf16 nothing[HEAD_DIM];
    bf16 rows[LANES][HEAD_DIM], turned[LANES * HEAD_DIM];
    int halves = count > TILE ? 2 : 1;
    memset(sums->total, 0, halves * TILE * sizeof *sums->total);
    for (int i = 0; i < halves * TILE; i++) {
        sums->best[i] = -INFINITY, sums->sum[i] = 0.0f;
        memcpy(rows[i], i < count ? queries[i] : nothing, sizeof nothing);
    }
    for (int half = 0; half < halves; half++)
        for (int i = 0; i < HEAD_DIM; i += DEPTH)
            transpose((uint32_t *)(turned + (half * HEAD_DIM + i) * TILE), TILE,
                      (const uint32_t *)(rows[half * TILE] + i), HEAD_DIM / 2);
    for (int64_t key = first; key < end; key += KEYS) {
        Block block;
        gather(&block, keys, values, pages, page_size, key, end - key < KEYS ? end - key : KEYS, stride);
        attend_block(sums, turned, &block, last, key, halves, scale);
    }
}

/* What a step attends to; see `Plan` in native/tile_attention.py, which makes it. */
typedef struct {
    const int32_t *page_table, *positions, *lanes, *slots, *item_starts, *item_rows, *item_firsts, *item_ends;
    const int32_t *part_starts;
    int64_t items, part_rows, columns, page_size, kv_heads;
    float scale;
} Plan;

/* A lane's sums of one part, in scratch. */
typedef struct {
    float total[HEAD_DIM], best, sum;
} Part;

/* Put the parts of one lane together, which are `stride` from each other; out [head_dim]. */
static inline void merge(bf16 *restrict out, const Part *restrict parts, int64_t count, int64_t stride) {
    float best = -INFINITY, sum = 0.0f, merged[HEAD_DIM] = {0};
    for (int64_t i = 0; i < count; i++) best = parts[i * stride].best > best ? parts[i * stride].best : best;
    for (int64_t i = 0; i < count; i++) {
        const Part *part = parts + i * stride;
        float weight = exp_of_negative(part->best - best);
        sum += weight * part->sum;
        for (int j = 0; j < HEAD_DIM; j++) merged[j] += weight * part->total[j];
    }
    for (int j = 0; j < HEAD_DIM; j++) out[j] = narrow(merged[j] / sum);
}

/* Attend causally: queries [tokens, kv_heads * group, head_dim], out likewise; keys, values [pages, page_size, kv_heads,
 * head_dim]; scratch [kv_heads, slots]. */
void asyncllm_attend_tiles(bf16 *restrict out, Part *restrict scratch, const bf16 *restrict queries,
                           const bf16 *restrict keys, const bf16 *restrict values, const Plan *plan) {
    const int64_t kv_heads = plan->kv_heads, stride = kv_heads * HEAD_DIM;
    const int64_t slots = plan->part_starts[plan->part_rows] * GROUP;
    Tiles tiles = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) tiles.row_bytes[tile] = 64, tiles.rows[tile] = TILE;
#pragma omp parallel if (plan->items * kv_heads > 4)
    {
        Tiles found;
        _tile_storeconfig(&found);
        _tile_loadconfig(&tiles);
#pragma omp for schedule(dynamic)
        for (int64_t place = 0; place < plan->items * kv_heads; place++) {
            int64_t item = place / kv_heads, kv_head = place % kv_heads;
            int64_t from = plan->item_starts[item], count = plan->item_starts[item + 1] - from;
            const bf16 *lane_queries[LANES];
            int32_t last[LANES] = {0};
            Sums sums;
            for (int64_t i = 0; i < count; i++) {
                int64_t lane = plan->lanes[from + i], token = lane / GROUP;
                lane_queries[i] = queries + ((token * kv_heads + kv_head) * GROUP + lane % GROUP) * HEAD_DIM;
                last[i] = plan->positions[token];
            }
            attend_lanes(&sums, lane_queries, last, count, keys + kv_head * HEAD_DIM, values + kv_head * HEAD_DIM,
                         plan->page_table + plan->item_rows[item] * plan->columns, plan->item_firsts[item],
                         plan->item_ends[item], plan->page_size, stride, plan->scale);
            for (int64_t i = 0; i < count; i++) {
                int32_t slot = plan->slots[from + i];
                if (slot < 0) {
                    bf16 *to = out + (lane_queries[i] - queries);
                    for (int j = 0; j < HEAD_DIM; j++) to[j] = narrow(sums.total[i][j] / sums.sum[i]);
                } else {
                    Part *part = scratch + kv_head * slots + slot;
                    memcpy(part->total, sums.total[i], sizeof part->total);
                    part->best = sums.best[i];
                    part->sum = sums.sum[i];
                }
            }
        }
        _tile_loadconfig(&found);
#pragma omp for schedule(static)
        for (int64_t place = 0; place < plan->part_rows * kv_heads; place++) {
            int64_t row = place / kv_heads, kv_head = place % kv_heads;
            int64_t first = plan->part_starts[row], count = plan->part_starts[row + 1] - first;
            if (count == 1) continue; /* it is in out already */
            for (int64_t g = 0; g < GROUP; g++)
                merge(out + ((row * kv_heads + kv_head) * GROUP + g) * HEAD_DIM,
                      scratch + kv_head * slots + first * GROUP + g, count, GROUP);
        }
    }
}
#else
int asyncllm_can_attend_tiles(void) { return 0; }
void asyncllm_attend_tiles(bf16 *restrict out, float *restrict scratch, const bf16 *restrict queries,
                           const bf16 *restrict keys, const bf16 *restrict values, const void *plan) {
    (void)out, (void)scratch, (void)queries, (void)keys, (void)values, (void)plan;
}
#endif
