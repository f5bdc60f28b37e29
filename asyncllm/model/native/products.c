/* Matrix products in bfloat16 on a processor's matrix unit (AMX), with what follows each folded in.
 *
 * Built and called like kernels.c; the plain torch twins are in asyncllm/model/linear.py. Weights [out, in] come in
 * blocks of 32 outputs, [out / 32, in / 2, 32, 2]: two tiles stand side by side, and a block is read once from front
 * to back, which is what a product of few rows takes its time for.
 *
 * Invariant: a sum is made in the same order whatever rows are beside it. The layout of the tile registers is left as
 * it was found, for others in the process that use them too.
 */
#include "common.h"
#include "tiles.h"

enum { PLAIN, GATED };

#ifdef ASYNCLLM_TILES

#define BLOCK (2 * TILE)    /* rows and outputs that are computed at once: four tiles of sums */
#define AHEAD 4096          /* bytes of weights that are asked for before they are needed */
#define ROWS_BYTES (1 << 20) /* of rows that pass all weights before the next ones do: what a second-level cache holds */

int asyncllm_can_multiply(void) { return may_use_tiles(); }

/* Sums of rows 0..15 in tiles 0 and 1, of rows 16..31 in 2 and 3; rows in 4 and 5, weights in 6 and 7. */
static void lay_out_tiles(int64_t rows) {
    Tiles tiles = {.palette = 1};
    uint8_t first = rows < TILE ? rows : TILE, second = rows > TILE ? rows - TILE : 1;
    for (int tile = 0; tile < 8; tile++) tiles.row_bytes[tile] = 64, tiles.rows[tile] = tile & 2 ? second : first;
    tiles.rows[4] = first, tiles.rows[5] = second;
    tiles.rows[6] = tiles.rows[7] = TILE;
    _tile_loadconfig(&tiles);
}

/* sums [2, 2, 16, 16] (rows by 16, outputs by 16) = rows of x [rows, in] times a block of weights; first: they come
 * from memory. */
static inline void multiply_block(float *sums, const bf16 *x, const bf16 *weight, int64_t rows, int64_t in, int first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < in; k += DEPTH) {
        const bf16 *w = weight + k * BLOCK;
        if (first)
            for (int line = 0; line < BLOCK; line++) _mm_prefetch((const char *)w + AHEAD + line * 64, _MM_HINT_T0);
        _tile_loadd(6, w, 4 * BLOCK);
        _tile_loadd(7, w + BLOCK, 4 * BLOCK);
        _tile_loadd(4, x + k, 2 * in);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (rows > TILE) {
            _tile_loadd(5, x + TILE * in + k, 2 * in);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    if (rows > TILE) {
        _tile_stored(2, sums + 512, 64);
        _tile_stored(3, sums + 768, 64);
    }
}

static const float no_bias[BLOCK];

/* Of `rows` rows of sums, to columns 0..count of out: out = sums + bias + residual. */
static inline void write_plain(bf16 *out, const bf16 *residual, const float *sums, const float *bias, int64_t rows,
                               int64_t count, int64_t stride) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t half = 0; half < 2 && half * TILE < count; half++) {
            const float *from = sums + ((row / TILE) * 2 + half) * 256 + (row % TILE) * TILE;
            int64_t at = row * stride + half * TILE;
            __mmask16 there = count - half * TILE < TILE ? (1u << (count - half * TILE)) - 1 : 0xffff;
            __m512 sum = _mm512_add_ps(_mm512_loadu_ps(from), _mm512_loadu_ps(bias + half * TILE));
            if (residual) {
                __m512i before = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, residual + at));
                sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(before, 16)));
            }
            _mm256_mask_storeu_epi16(out + at, there, (__m256i)_mm512_cvtneps_pbh(sum));
        }
}

/* Gates in the first 16 columns, what they gate in the last: out [rows, 16] = silu(gate) * up. */
static inline void write_gated(bf16 *out, const float *sums, const float *bias, int64_t rows, int64_t stride) {
    for (int64_t row = 0; row < rows; row++) {
        const float *from = sums + (row / TILE) * 512 + (row % TILE) * TILE;
        float gated[TILE];
#pragma omp simd
        for (int i = 0; i < TILE; i++) {
            float gate = from[i] + bias[i], up = from[256 + i] + bias[TILE + i];
            float e = exp_of_negative(gate < 0.0f ? gate : -gate);
            gated[i] = gate * (gate < 0.0f ? e : 1.0f) / (1.0f + e) * up;
        }
        _mm256_storeu_si256((void *)(out + row * stride), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(gated)));
    }
}

/* out [rows, out_width] of x [rows, in], weight as above, bias [outs rounded up to 32] or null.
 *
 * kind PLAIN: x @ weight.T + bias + residual [rows, outs] (or null; may be out). GATED: outputs come 16 gates and 16
 * that they gate in turn, out is silu(gate) * the other, [rows, outs / 2]. `in` is a multiple of 32. */
void asyncllm_multiply(bf16 *out, const bf16 *restrict x, const bf16 *restrict weight, const float *restrict bias,
                       const bf16 *residual, int64_t rows, int64_t in, int64_t outs, int64_t kind) {
    int64_t blocks = (outs + BLOCK - 1) / BLOCK, width = kind == GATED ? outs / 2 : outs;
    int64_t pass = ROWS_BYTES / (2 * in) / BLOCK * BLOCK;
    pass = pass < BLOCK ? BLOCK : pass;
#pragma omp parallel if (rows * in * outs > 4 * SERIAL_ELEMENTS)
    {
        Tiles found;
        _tile_storeconfig(&found);
        int64_t laid_out = 0;
        for (int64_t first = 0; first < rows; first += pass) {
            int64_t end = first + pass < rows ? first + pass : rows;
#pragma omp for schedule(static) nowait
            for (int64_t block = 0; block < blocks; block++) {
                const float *added = bias ? bias + block * BLOCK : no_bias;
                for (int64_t row = first; row < end; row += BLOCK) {
                    int64_t count = end - row < BLOCK ? end - row : BLOCK;
                    float sums[4 * 256] __attribute__((aligned(64)));
                    if (count != laid_out) lay_out_tiles(laid_out = count);
                    multiply_block(sums, x + row * in, weight + block * BLOCK * in, count, in, row == first);
                    if (kind == GATED) {
                        write_gated(out + row * width + block * TILE, sums, added, count, width);
                    } else {
                        int64_t at = row * width + block * BLOCK;
                        write_plain(out + at, residual ? residual + at : NULL, sums, added, count,
                                    outs - block * BLOCK, width);
                    }
                }
            }
        }
        _tile_loadconfig(&found);
    }
}
#else
int asyncllm_can_multiply(void) { return 0; }
void asyncllm_multiply(bf16 *out, const bf16 *restrict x, const bf16 *restrict weight, const float *restrict bias,
                       const bf16 *residual, int64_t rows, int64_t in, int64_t outs, int64_t kind) {
    (void)out, (void)x, (void)weight, (void)bias, (void)residual, (void)rows, (void)in, (void)outs, (void)kind;
}
#endif
